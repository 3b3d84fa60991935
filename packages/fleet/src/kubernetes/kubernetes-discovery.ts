import { ambient, type Clock, KvError, type Random, type Timer } from "@kv/interface";
import type { DiscoveredInstances, Discovery } from "../discovery/discovery.js";
import { type InstanceSpec, instanceName, type Role } from "../instances/instance.js";
import { ApiConnection, type KubernetesAccess } from "./api-connection.js";
import {
  type FoundPod,
  type PortName,
  type ReadingOptions,
  readEndpointSlice,
  readPod,
} from "./read-objects.js";
import { Reflector } from "./reflector.js";

/** Options of `kubernetesDiscovery`. Either `podSelector` or `services` is given. */
export interface KubernetesDiscoveryOptions extends KubernetesAccess {
  /** The namespace. @default that of the context, or of the pod */
  readonly namespace?: string | undefined;
  /**
   * Follows the pods with these labels, such as `app=vllm`. Their roles are by `roleLabel`.
   */
  readonly podSelector?: string | undefined;
  /**
   * Follows the EndpointSlices of one service for each role. Their pods need no role label.
   */
  readonly services?: Readonly<Record<Role, string>> | undefined;
  /**
   * Port of the HTTP server: a number, or a port's name; one for both roles or one each. @default
   * "http"
   */
  readonly port?: PortName | Readonly<Record<Role, PortName>> | undefined;
  /**
   * Port of the side channel, for pairing and push. Without it, it is learned from answers.
   */
  readonly sideChannelPort?: PortName | undefined;
  /**
   * The label with a pod's role, in llm-d's values: `prefill`, `decode`, `both`, `prefill-decode`,
   * … @default "llm-d.ai/role"
   */
  readonly roleLabel?: string | undefined;
  /**
   * Pods with the same value fit one another: a hint for pairing without side channels. With
   * `services`, a label of the service.
   */
  readonly revisionLabel?: string | undefined;
  /**
   * The label with the number of data-parallel ranks; each rank is an instance.
   */
  readonly dataParallelLabel?: string | undefined;
  /**
   * The address family to take where a pod has both. @default the pod's first address; of services
   * IPv4
   */
  readonly ipFamily?: 4 | 6 | undefined;
  /** Source of time. @default systemClock() */
  readonly clock?: Clock | undefined;
  /** Spreads the attempts to connect again. @default systemRandom() */
  readonly random?: Random | undefined;
}

/** Changes within this time are reported once. */
const COALESCE_MS = 20;

/**
 * Follows pods, or the EndpointSlices of services, in a Kubernetes cluster. An instance that is not
 * ready, or that begins to end, is left out at once. While the API server cannot be read, the last
 * known instances stay. The API server itself is asked by `watch` first.
 *
 * @throws `KV_CONFIG_INVALID` where the package `@kubernetes/client-node` is not installed, or the
 * cluster's configuration cannot be read.
 */
export async function kubernetesDiscovery(options: KubernetesDiscoveryOptions): Promise<Discovery> {
  const { podSelector, services, port = "http", roleLabel = "llm-d.ai/role", ipFamily } = options;
  const { clock, random } = ambient(options);
  const ports = typeof port === "object" ? port : { prefill: port, decode: port };
  const reading: ReadingOptions = { ...options, port: ports, roleLabel };
  if ((services === undefined) === (podSelector === undefined)) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      "discovery in Kubernetes needs either podSelector or services",
      {
        hint: "give the labels of the pods, such as app=vllm, or a service for each role",
      },
    );
  }
  const connection = new ApiConnection(options);
  const namespace = encodeURIComponent(options.namespace ?? (await connection.namespace()));
  const rolesOf = (service: string) =>
    (["prefill", "decode"] as const).filter((role) => services?.[role] === service);
  const followed =
    services === undefined
      ? {
          name: `Kubernetes pods ${podSelector}`,
          path: `/api/v1/namespaces/${namespace}/pods`,
          labelSelector: podSelector ?? "",
          read(object: unknown) {
            const pod = readPod(object, reading);
            return pod === undefined ? undefined : [pod];
          },
        }
      : {
          name: `Kubernetes services ${services.prefill} ${services.decode}`,
          path: `/apis/discovery.k8s.io/v1/namespaces/${namespace}/endpointslices`,
          labelSelector: `kubernetes.io/service-name in (${services.prefill},${services.decode})`,
          read: (object: unknown) => readEndpointSlice(object, rolesOf, reading),
        };
  const { name, ...collection } = followed;
  return {
    name,
    watch(onChange, onError) {
      let timer: Timer | undefined;
      const reflector = new Reflector<readonly FoundPod[]>({
        ...collection,
        connection,
        clock,
        random,
        onError,
        onChange() {
          timer ??= clock.setTimer(() => {
            timer = undefined;
            const items = reflector.items();
            if (items !== undefined) onChange(combined(items, ipFamily ?? 4));
          }, COALESCE_MS);
        },
      });
      return {
        close() {
          reflector.close();
          timer?.cancel();
        },
      };
    },
  };
}

/**
 * The instances of all pods, each once: a pod may be in slices of both address families, and for a
 * while in two slices of one.
 */
function combined(items: Iterable<readonly FoundPod[]>, family: 4 | 6): DiscoveredInstances {
  const pods = new Map<string, FoundPod[]>();
  for (const found of items)
    for (const pod of found) pods.set(pod.uid, [...(pods.get(pod.uid) ?? []), pod]);
  const byRole = {
    prefillers: new Map<string, InstanceSpec>(),
    decoders: new Map<string, InstanceSpec>(),
  };
  for (const all of pods.values()) {
    const preferred = all.filter((pod) => pod.family === family);
    for (const pod of preferred.length > 0 ? preferred : all)
      for (const role of ["prefillers", "decoders"] as const)
        for (const spec of pod[role]) byRole[role].set(instanceName(spec), spec);
  }
  return { prefillers: [...byRole.prefillers.values()], decoders: [...byRole.decoders.values()] };
}
