import type { ProxySettingsInput } from "@kv/proxy";
import { PUSH_CONNECTOR_NAMES } from "@kv/push";
import type { InstanceConfigInput } from "../instance/instance-config.js";

/** What is to run. */
export interface ClusterOptions {
  readonly transport: "nixl" | "memory";
  /** NIXL's backend; the transport's default when absent. */
  readonly backend?: string;
  readonly connector: string;
  /** Where the connector comes from when it is not one that the demo knows. */
  readonly connectorModule?: string;
  readonly prefills: number;
  readonly decodes: number;
  readonly prefillTp: number;
  readonly decodeTp: number;
  readonly prefillBlockSize: number;
  readonly decodeBlockSize: number;
  /** Tokens that an instance's cache holds, at least. */
  readonly cacheTokens: number;
  readonly model?: string;
  readonly tinyKvHeads?: number;
  /** What each side runs on; the CPU when absent. */
  readonly prefillPlatform?: "cpu" | "neuron";
  readonly decodePlatform?: "cpu" | "neuron";
  /** Blocks of a staging pool; as many as the cache has when absent. */
  readonly stagingBlocks?: number;
  /** Seconds that a lease lasts, and a request may wait for its KV; the connector's own when absent. */
  readonly leaseSeconds?: number;
  readonly requestTimeoutSeconds?: number;
  /** Of push, at the proxy; both legs at once when absent. */
  readonly pushLegs?: "at-once" | "prefill-first";
  /** Of push: layers are written as they are computed. */
  readonly pushLayerwise?: boolean;
  /** Settings of both instances, or of the prefill alone, beside these. */
  readonly instance?: Partial<InstanceConfigInput>;
  readonly prefillInstance?: Partial<InstanceConfigInput>;
}

export interface PlannedInstance {
  readonly name: string;
  readonly config: InstanceConfigInput;
}

/** Settings of every instance, prefills first. */
export function planInstances(options: ClusterOptions): {
  prefills: PlannedInstance[];
  decodes: PlannedInstance[];
} {
  const { prefills, decodes } = options;
  return {
    prefills: Array.from({ length: prefills }, (_, i) => plan("prefill", i, options)),
    decodes: Array.from({ length: decodes }, (_, i) => plan("decode", i, options)),
  };
}

function plan(role: "prefill" | "decode", index: number, options: ClusterOptions): PlannedInstance {
  const name = `${role}-${index}`;
  const blockSize = role === "prefill" ? options.prefillBlockSize : options.decodeBlockSize;
  const platform = (role === "prefill" ? options.prefillPlatform : options.decodePlatform) ?? "cpu";
  const neuron = options.prefillPlatform === "neuron" || options.decodePlatform === "neuron";
  const extra = {
    ...(options.backend === undefined ? {} : { backends: [options.backend] }),
    ...(options.leaseSeconds === undefined ? {} : { kv_lease_duration: options.leaseSeconds }),
    ...(options.requestTimeoutSeconds === undefined
      ? {}
      : { request_timeout: options.requestTimeoutSeconds }),
    ...(options.pushLayerwise === true ? { push_layerwise: true } : {}),
  };
  const config: InstanceConfigInput = {
    role,
    name,
    tp: role === "prefill" ? options.prefillTp : options.decodeTp,
    blockSize,
    platform,
    ...(options.stagingBlocks === undefined || platform === "cpu"
      ? {}
      : { stagingBlocks: options.stagingBlocks }),
    // One is the null block, and each request may leave its last one half empty.
    numBlocks: Math.max(64, Math.ceil(options.cacheTokens / blockSize) + 1),
    kvTransferConfig: {
      kv_connector: options.connector,
      // With Neuron, as the configuration of vllm-neuron's issue 26 has it.
      kv_role: neuron ? "kv_both" : role === "prefill" ? "kv_producer" : "kv_consumer",
      ...(neuron ? { kv_buffer_device: "cpu" } : {}),
      ...(options.connectorModule === undefined ? {} : { kv_connector_module_path: options.connectorModule }),
      kv_connector_extra_config: extra,
    },
    // On the memory network a host is found by its name.
    sideChannelHost: options.transport === "memory" ? name : "127.0.0.1",
    digests: true,
    debug: true,
    graceMs: 2000,
    ...(options.model === undefined ? {} : { model: options.model }),
    ...(options.tinyKvHeads === undefined ? {} : { tinyKvHeads: options.tinyKvHeads }),
    ...options.instance,
    ...(role === "prefill" ? options.prefillInstance : {}),
  };
  return { name, config };
}

export function planProxy(
  prefillers: readonly string[],
  decoders: readonly string[],
  { connector, pushLegs }: Pick<ClusterOptions, "connector" | "pushLegs">,
): ProxySettingsInput {
  return {
    prefillers: [...prefillers],
    decoders: [...decoders],
    timeouts: { graceMs: 2000 },
    mode: PUSHING.includes(connector) ? "push" : "pull",
    ...(pushLegs === undefined ? {} : { pushLegs }),
  };
}

const PUSHING: readonly string[] = PUSH_CONNECTOR_NAMES;
