import type { ProxySettingsInput } from "@kv/proxy";
import { PUSH_CONNECTOR_NAMES } from "@kv/push";
import type { SideChannelAddress } from "../instance/engine-rank.js";
import type { InstanceConfigInput } from "../instance/instance-config.js";

/** Where an instance keeps its KV cache. */
export type PlatformName = "cpu" | "cuda" | "neuron";

/** The instances to run and their settings. */
export interface ClusterOptions {
  /** `module`: that of `transportModule`. */
  readonly transport: "nixl" | "memory" | "module";
  readonly transportModule?: string | undefined;
  /** NIXL backend. Default: the transport's. */
  readonly backend?: string | undefined;
  readonly connector: string;
  /** Module of a connector that the demo does not know. */
  readonly connectorModule?: string | undefined;
  /** Module of a platform, for all instances. */
  readonly platformModule?: string | undefined;
  /** Module of a kind of cache, for all instances. */
  readonly cacheKindModule?: string | undefined;
  readonly prefills: number;
  readonly decodes: number;
  readonly prefillTp: number;
  readonly decodeTp: number;
  readonly prefillBlockSize: number;
  readonly decodeBlockSize: number;
  /** Least number of tokens that the cache of an instance holds. */
  readonly cacheTokens: number;
  readonly model?: string | undefined;
  readonly tinyKvHeads?: number | undefined;
  /** Default: cpu. */
  readonly prefillPlatform?: PlatformName | undefined;
  /** Default: cpu. */
  readonly decodePlatform?: PlatformName | undefined;
  /** Blocks of a staging pool. Default: as many as the cache has. */
  readonly stagingBlocks?: number | undefined;
  /** Lease of the blocks that a prefill instance keeps. Default: the connector's. */
  readonly leaseSeconds?: number | undefined;
  /** How long a request may wait for its KV. Default: the connector's. */
  readonly requestTimeoutSeconds?: number | undefined;
  /** With push: the order of the proxy's two requests. Default: at once. */
  readonly pushLegs?: "at-once" | "prefill-first" | undefined;
  /** With push: layers are written as they are computed. Default: false. */
  readonly pushLayerwise?: boolean | undefined;
  /** Keys of `kv_connector_extra_config` of all instances. */
  readonly extraConfig?: Readonly<Record<string, unknown>> | undefined;
  /**
   * The proxy has P read ended turns back from D. Both need `bidirectional_kv_xfer` in
   * `extraConfig`. Default: false.
   */
  readonly readback?: boolean | undefined;
  /** Port of the proxy's admin routes and page. Default: none. */
  readonly adminPort?: number | undefined;
  /** Further settings of all instances. */
  readonly instance?: Partial<InstanceConfigInput> | undefined;
  /** Further settings of the prefill instances. */
  readonly prefillInstance?: Partial<InstanceConfigInput> | undefined;
}

export interface PlannedInstance {
  readonly name: string;
  readonly config: InstanceConfigInput;
}

/** Plans the settings of every instance. */
export function planInstances(options: ClusterOptions): {
  prefills: PlannedInstance[];
  decodes: PlannedInstance[];
} {
  const { prefills, decodes } = options;
  return {
    prefills: Array.from({ length: prefills }, (_, i) => planInstance("prefill", i, options)),
    decodes: Array.from({ length: decodes }, (_, i) => planInstance("decode", i, options)),
  };
}

function planInstance(
  role: "prefill" | "decode",
  index: number,
  options: ClusterOptions,
): PlannedInstance {
  const name = `${role}-${index}`;
  const blockSize = role === "prefill" ? options.prefillBlockSize : options.decodeBlockSize;
  const platform = platformOf(role, options);
  const config: InstanceConfigInput = {
    role,
    name,
    tp: role === "prefill" ? options.prefillTp : options.decodeTp,
    blockSize,
    platform,
    transportModule: options.transportModule,
    platformModule: options.platformModule,
    cacheKindModule: options.cacheKindModule,
    stagingBlocks: platform === "neuron" ? options.stagingBlocks : undefined,
    // One block is the null block, and the last block of each request may be partly empty.
    numBlocks: Math.max(64, Math.ceil(options.cacheTokens / blockSize) + 1),
    kvTransferConfig: planTransferConfig(role, options),
    // On the memory network a host is found by its name.
    sideChannelHost: options.transport === "memory" ? name : "127.0.0.1",
    digests: true,
    debug: true,
    graceMs: 2000,
    model: options.model,
    tinyKvHeads: options.tinyKvHeads,
    ...options.instance,
    ...(role === "prefill" ? options.prefillInstance : {}),
  };
  return { name, config };
}

const platformOf = (role: "prefill" | "decode", options: ClusterOptions): PlatformName =>
  (role === "prefill" ? options.prefillPlatform : options.decodePlatform) ?? "cpu";

/** vLLM's `kv_transfer_config`; an option that was not given has no key. */
function planTransferConfig(
  role: "prefill" | "decode",
  options: ClusterOptions,
): Record<string, unknown> {
  const neuron = options.prefillPlatform === "neuron" || options.decodePlatform === "neuron";
  return withoutUndefined({
    kv_connector: options.connector,
    // With Neuron, the configuration of vllm-neuron's issue 26.
    kv_role: neuron ? "kv_both" : role === "prefill" ? "kv_producer" : "kv_consumer",
    kv_buffer_device: platformOf(role, options) === "cuda" ? "cuda" : neuron ? "cpu" : undefined,
    kv_connector_module_path: options.connectorModule,
    kv_connector_extra_config: withoutUndefined({
      backends: options.backend === undefined ? undefined : [options.backend],
      kv_lease_duration: options.leaseSeconds,
      request_timeout: options.requestTimeoutSeconds,
      push_layerwise: options.pushLayerwise === true ? true : undefined,
      ...options.extraConfig,
    }),
  });
}

function withoutUndefined(settings: Record<string, unknown>): Record<string, unknown> {
  return Object.fromEntries(Object.entries(settings).filter(([, value]) => value !== undefined));
}

/** An instance that runs, for the proxy's settings. */
interface ProxiedInstance {
  readonly url: string;
  readonly sideChannel?: SideChannelAddress | null | undefined;
}

/**
 * With the address of its side channel, the proxy verifies that an instance fits before the first
 * request.
 */
function instanceSpec({ url, sideChannel }: ProxiedInstance) {
  return sideChannel == null
    ? url
    : { url, kv: { host: sideChannel.host, port: sideChannel.port } };
}

/** Plans the settings of the proxy. */
export function planProxy(
  prefillers: readonly ProxiedInstance[],
  decoders: readonly ProxiedInstance[],
  {
    connector,
    pushLegs,
    readback,
    adminPort,
  }: Pick<ClusterOptions, "connector" | "pushLegs" | "readback" | "adminPort">,
): ProxySettingsInput {
  return {
    prefillers: prefillers.map(instanceSpec),
    decoders: decoders.map(instanceSpec),
    timeouts: { graceMs: 2000 },
    mode: (PUSH_CONNECTOR_NAMES as readonly string[]).includes(connector) ? "push" : "pull",
    ...(pushLegs === undefined ? {} : { pushLegs }),
    // The built-in model's prompts are short, and its cache holds few of them.
    ...(readback === true ? { readback: { minTokens: 1, cachePercent: 60 } } : {}),
    ...(adminPort === undefined ? {} : { admin: { port: adminPort } }),
  };
}
