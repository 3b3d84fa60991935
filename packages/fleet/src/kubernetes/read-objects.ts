import { isIP } from "node:net";
import { z } from "zod";
import type { InstanceSpec, Role } from "../instances/instance.js";

/** A port by its number, or by its name in the pod or the service. */
export type PortName = string | number;

/** How objects of the API become instances. */
export interface ReadingOptions {
  readonly port: Readonly<Record<Role, PortName>>;
  readonly sideChannelPort?: PortName | undefined;
  readonly roleLabel: string;
  readonly revisionLabel?: string | undefined;
  readonly dataParallelLabel?: string | undefined;
  readonly ipFamily?: 4 | 6 | undefined;
}

/** The instances of one pod, or of one endpoint of a service. */
export interface FoundPod {
  readonly uid: string;
  readonly family: number;
  readonly prefillers: readonly InstanceSpec[];
  readonly decoders: readonly InstanceSpec[];
}

const text = z.string().max(1024);
const port = z.number().int().min(1).max(65_535);
const labels = z.record(text, text).nullish();
const containers = z
  .array(
    z.object({ ports: z.array(z.object({ name: text.nullish(), containerPort: port })).nullish() }),
  )
  .nullish();

const podSchema = z.object({
  metadata: z.object({ uid: text, deletionTimestamp: text.nullish(), labels }),
  spec: z.object({ containers, initContainers: containers }).nullish(),
  status: z
    .object({
      podIP: text.nullish(),
      podIPs: z.array(z.object({ ip: text.nullish() })).nullish(),
      conditions: z.array(z.object({ type: text, status: text })).nullish(),
    })
    .nullish(),
});

const sliceSchema = z.object({
  metadata: z.object({ labels }),
  addressType: text,
  ports: z.array(z.object({ name: text.nullish(), port: port.nullish() })).nullish(),
  endpoints: z
    .array(
      z.object({
        addresses: z.array(text).min(1),
        conditions: z
          .object({ ready: z.boolean().nullish(), terminating: z.boolean().nullish() })
          .nullish(),
        targetRef: z.object({ uid: text.nullish() }).nullish(),
      }),
    )
    .nullish(),
});

/** The values of the role label, as llm-d has them, and the roles that they stand for. */
const ROLES: Readonly<Record<string, readonly Role[]>> = {
  prefill: ["prefill"],
  "encode-prefill": ["prefill"],
  decode: ["decode"],
  both: ["prefill", "decode"],
  "prefill-decode": ["prefill", "decode"],
  "encode-prefill-decode": ["prefill", "decode"],
};

/** The instances of a pod that is ready and does not end; undefined for another object. */
export function readPod(object: unknown, options: ReadingOptions): FoundPod | undefined {
  const parsed = podSchema.safeParse(object);
  if (!parsed.success) return undefined;
  const { metadata, spec, status } = parsed.data;
  if (metadata.deletionTimestamp != null) return undefined;
  if (!status?.conditions?.some((one) => one.type === "Ready" && one.status === "True"))
    return undefined;
  const ips = [...(status.podIPs ?? []).map(({ ip }) => ip), status.podIP].filter(
    (ip) => ip != null,
  );
  const ip = ips.find((each) => isIP(each) === options.ipFamily) ?? ips[0];
  if (ip === undefined || isIP(ip) === 0) return undefined;
  // A sidecar of the pod may be an init container that goes on.
  const ports = [...(spec?.containers ?? []), ...(spec?.initContainers ?? [])].flatMap(
    (one) => one.ports ?? [],
  );
  const number = (name: PortName) =>
    typeof name === "number" ? name : ports.find((one) => one.name === name)?.containerPort;
  const labelled = metadata.labels ?? {};
  const roles = ROLES[labelled[options.roleLabel] ?? ""] ?? [];
  return found({ uid: metadata.uid, ip, roles, number, labelled }, options);
}

/**
 * The instances of the endpoints of a slice that are ready and do not end. `roles` are by the name
 * of the service.
 */
export function readEndpointSlice(
  object: unknown,
  roles: (service: string) => readonly Role[],
  options: ReadingOptions,
): readonly FoundPod[] | undefined {
  const parsed = sliceSchema.safeParse(object);
  if (!parsed.success || !/^IPv[46]$/.test(parsed.data.addressType)) return undefined;
  const { metadata, endpoints, ports } = parsed.data;
  const labelled = metadata.labels ?? {};
  const number = (name: PortName) =>
    typeof name === "number" ? name : (ports?.find((one) => one.name === name)?.port ?? undefined);
  return (endpoints ?? []).flatMap(({ addresses: [ip = ""], conditions, targetRef }) => {
    // An absent condition means that it is not known, which counts as ready.
    if (conditions?.ready === false || conditions?.terminating === true || isIP(ip) === 0)
      return [];
    const own = roles(labelled["kubernetes.io/service-name"] ?? "");
    return found({ uid: targetRef?.uid ?? ip, ip, roles: own, number, labelled }, options) ?? [];
  });
}

interface Given {
  readonly uid: string;
  readonly ip: string;
  readonly roles: readonly Role[];
  readonly number: (name: PortName) => number | undefined;
  readonly labelled: Readonly<Record<string, string>>;
}

function found(
  { uid, ip, roles, number, labelled }: Given,
  options: ReadingOptions,
): FoundPod | undefined {
  const { sideChannelPort, revisionLabel, dataParallelLabel } = options;
  const side = sideChannelPort === undefined ? undefined : number(sideChannelPort);
  const kv = side === undefined ? undefined : { host: ip, port: side };
  const label = revisionLabel === undefined ? undefined : labelled[revisionLabel] || undefined;
  const ranks = dataParallelLabel === undefined ? 0 : rankCount(labelled[dataParallelLabel]);
  const host = isIP(ip) === 6 ? `[${ip}]` : ip;
  const of = (role: Role): InstanceSpec[] => {
    const httpPort = roles.includes(role) ? number(options.port[role]) : undefined;
    if (httpPort === undefined) return [];
    const spec = { url: new URL(`http://${host}:${httpPort}`).origin, kv, label };
    if (ranks < 2) return [spec];
    return Array.from({ length: ranks }, (_, dataParallelRank) => ({ ...spec, dataParallelRank }));
  };
  const [prefillers, decoders] = [of("prefill"), of("decode")];
  if (prefillers.length + decoders.length === 0) return undefined;
  return { uid, family: isIP(ip), prefillers, decoders };
}

function rankCount(value: string | undefined): number {
  return value !== undefined && /^[0-9]{1,3}$/.test(value) ? Number(value) : 0;
}
