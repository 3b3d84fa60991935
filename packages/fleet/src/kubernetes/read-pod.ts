import { isIP } from "node:net";
import { z } from "zod";
import type { DiscoveredInstances } from "../discovery/discovery.js";
import type { InstanceSpec, Role } from "../instances/instance.js";
import type { KubernetesSettings } from "../settings/fleet-settings.js";

/** A port's number, or its name in the pod. */
export type PortName = string | number;

export interface ReadingOptions extends Omit<KubernetesSettings, "port"> {
  readonly port: Readonly<Record<Role, PortName>>;
  readonly roleLabel: string;
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

/** llm-d's values of the role label. */
const ROLES: Readonly<Record<string, readonly Role[]>> = {
  prefill: ["prefill"],
  "encode-prefill": ["prefill"],
  decode: ["decode"],
  both: ["prefill", "decode"],
  "prefill-decode": ["prefill", "decode"],
  "encode-prefill-decode": ["prefill", "decode"],
};

/** Undefined unless the pod is ready and stays. */
export function readPod(object: unknown, options: ReadingOptions): DiscoveredInstances | undefined {
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
  // A sidecar may be an init container that keeps running.
  const ports = [...(spec?.containers ?? []), ...(spec?.initContainers ?? [])].flatMap(
    (one) => one.ports ?? [],
  );
  const number = (name: PortName) =>
    typeof name === "number" ? name : ports.find((one) => one.name === name)?.containerPort;
  const labels = metadata.labels ?? {};
  const { sideChannelPort, revisionLabel, dataParallelLabel, roleLabel } = options;
  const side = sideChannelPort === undefined ? undefined : number(sideChannelPort);
  const kv = side === undefined ? undefined : { host: ip, port: side };
  const label = revisionLabel === undefined ? undefined : labels[revisionLabel] || undefined;
  const ranks = dataParallelLabel === undefined ? 0 : rankCount(labels[dataParallelLabel]);
  const roles = ROLES[labels[roleLabel] ?? ""] ?? [];
  const host = isIP(ip) === 6 ? `[${ip}]` : ip;
  const of = (role: Role): InstanceSpec[] => {
    const httpPort = roles.includes(role) ? number(options.port[role]) : undefined;
    if (httpPort === undefined) return [];
    const spec = { url: new URL(`http://${host}:${httpPort}`).origin, kv, label };
    if (ranks < 2) return [spec];
    return Array.from({ length: ranks }, (_, dataParallelRank) => ({ ...spec, dataParallelRank }));
  };
  const [prefillers, decoders] = [of("prefill"), of("decode")];
  return prefillers.length + decoders.length === 0 ? undefined : { prefillers, decoders };
}

function rankCount(value: string | undefined): number {
  return value !== undefined && /^[0-9]{1,3}$/.test(value) ? Number(value) : 0;
}
