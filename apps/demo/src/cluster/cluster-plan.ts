import type { ProxySettingsInput } from "@kv/proxy";
import { PUSH_CONNECTOR_NAMES } from "@kv/push";
import { defined } from "../defined.js";
import type { SideChannelAddress } from "../instance/engine-rank.js";
import type { InstanceConfigInput } from "../instance/instance-config.js";

export type PlatformName = "cpu" | "cuda" | "neuron";

export interface ClusterOptions {
  /** `module`: that of `transportModule`. */
  readonly transport: "nixl" | "memory" | "module";
  readonly transportModule?: string | undefined;
  readonly backend?: string | undefined;
  readonly connector: string;
  readonly connectorModule?: string | undefined;
  readonly platformModule?: string | undefined;
  readonly cacheKindModule?: string | undefined;
  readonly prefills: number;
  readonly decodes: number;
  readonly prefillTp: number;
  readonly decodeTp: number;
  readonly prefillBlockSize: number;
  readonly decodeBlockSize: number;
  readonly cacheTokens: number;
  readonly model?: string | undefined;
  readonly tinyKvHeads?: number | undefined;
  readonly prefillPlatform?: PlatformName | undefined;
  readonly decodePlatform?: PlatformName | undefined;
  readonly stagingBlocks?: number | undefined;
  readonly leaseSeconds?: number | undefined;
  readonly requestTimeoutSeconds?: number | undefined;
  readonly pushLegs?: "at-once" | "prefill-first" | undefined;
  readonly pushLayerwise?: boolean | undefined;
  readonly extraConfig?: Readonly<Record<string, unknown>> | undefined;
  /** P reads ended turns back from D, with `bidirectional_kv_xfer` in `extraConfig`. */
  readonly readback?: boolean | undefined;
  readonly adminPort?: number | undefined;
  readonly instance?: Partial<InstanceConfigInput> | undefined;
  readonly prefillInstance?: Partial<InstanceConfigInput> | undefined;
}

export interface PlannedInstance {
  readonly name: string;
  readonly config: InstanceConfigInput;
}

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

function planTransferConfig(
  role: "prefill" | "decode",
  options: ClusterOptions,
): Record<string, unknown> {
  const neuron = options.prefillPlatform === "neuron" || options.decodePlatform === "neuron";
  return defined({
    kv_connector: options.connector,
    // With Neuron, the configuration of vllm-neuron's issue 26.
    kv_role: neuron ? "kv_both" : role === "prefill" ? "kv_producer" : "kv_consumer",
    kv_buffer_device: platformOf(role, options) === "cuda" ? "cuda" : neuron ? "cpu" : undefined,
    kv_connector_module_path: options.connectorModule,
    kv_connector_extra_config: defined({
      backends: options.backend === undefined ? undefined : [options.backend],
      kv_lease_duration: options.leaseSeconds,
      request_timeout: options.requestTimeoutSeconds,
      push_layerwise: options.pushLayerwise === true ? true : undefined,
      ...options.extraConfig,
    }),
  });
}

interface ProxiedInstance {
  readonly url: string;
  readonly sideChannel?: SideChannelAddress | null | undefined;
}

/** By its side channel, the proxy verifies that an instance fits before the first request. */
function instanceSpec({ url, sideChannel }: ProxiedInstance) {
  return sideChannel == null
    ? url
    : { url, kv: { host: sideChannel.host, port: sideChannel.port } };
}

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
    ...defined({
      pushLegs,
      // The built-in model's prompts are short, and its cache holds few of them.
      readback: readback === true ? { minTokens: 1, cachePercent: 60 } : undefined,
      admin: adminPort === undefined ? undefined : { port: adminPort },
    }),
  };
}
