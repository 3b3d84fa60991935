import { readTransferConfig } from "@kv/connector";
import { KvError, type KvTransferConfig, type Log } from "@kv/interface";
import { unknownKeys } from "@kv/program/unknown-keys";
import { z } from "zod";
import type { HttpLimits } from "../http/limits.js";

const INSTANCE_ROLES = ["prefill", "decode", "both"] as const;
export type InstanceRole = (typeof INSTANCE_ROLES)[number];

const count = z.number().int().positive();
const port = z.number().int().min(0).max(65_535);

/** Factors of the compatibility hash, for pairs with vLLM. The defaults are those of vLLM 0.33. */
const compatSchema = z.strictObject({
  /** The peer's `--model`. */
  model: z.string().optional(),
  vllmVersion: z.string().default("0.33.0"),
  connectorVersion: count.default(15),
  isHmaEnabled: z.boolean().default(true),
  /** The peer's, such as CPU_ATTN: hashed, although this instance announces another one. */
  attentionBackend: z.string().optional(),
});

const httpLimitsSchema = z.strictObject({
  maxConnections: count.optional(),
  maxConnectionsPerAddress: count.optional(),
  maxRequests: count.optional(),
  maxRequestsPerAddress: count.optional(),
  maxRequestsPerConnection: count.optional(),
  maxHeaderBytes: count.optional(),
  headerTimeoutMs: count.optional(),
  requestTimeoutMs: count.optional(),
  idleTimeoutMs: count.optional(),
  maxBodyBytes: count.optional(),
  maxBodiesBytes: count.optional(),
  maxBodiesBytesPerAddress: count.optional(),
  maxBodyDepth: count.optional(),
  maxBodyMembers: count.optional(),
  maxUnreadBytes: count.optional(),
} satisfies Record<keyof HttpLimits, z.ZodType>);

const instanceConfigSchema = z.strictObject({
  role: z.enum(INSTANCE_ROLES),
  name: z.string().min(1).optional(),
  host: z.string().min(1).default("127.0.0.1"),
  /** 0 takes a free one. */
  port: port.default(0),
  /** A directory with a decoder. Default: the built-in tiny model. */
  model: z.string().min(1).optional(),
  /** Default: the directory's name. */
  servedModelName: z.string().min(1).optional(),
  tinyKvHeads: count.optional(),
  intraOpThreads: count.max(1024).default(1),
  tp: count.max(64).default(1),
  /** Data-parallel ranks: engines that share the model and the HTTP server. */
  dp: count.max(64).default(1),
  blockSize: count.max(4096).default(16),
  numBlocks: count.min(2).default(512),
  /** Default: 64, or 1 on Neuron. */
  maxNumSeqs: count.optional(),
  /** A longer prompt is computed in chunks, as in vLLM. */
  maxNumBatchedTokens: count.default(8192),
  /** Default: as many as the platform allows. */
  maxConcurrentBatches: count.optional(),
  /** Default: the model's, or what the cache holds if that is less. */
  maxModelLen: count.optional(),
  /** Default: true, or false on Neuron. */
  prefixCaching: z.boolean().optional(),
  /**
   * Where the KV cache lies. `cuda`: memory of NVIDIA GPUs; the model still computes on the CPU.
   * `neuron`: a simulated device whose blocks are staged through host memory.
   */
  platform: z.enum(["cpu", "cuda", "neuron"]).default("cpu"),
  /** EC2 instance type or family of the simulated device. Default: trn1. */
  neuronFamily: z.string().min(1).optional(),
  /** In place of NIXL: a package, a path or a URL. */
  transportModule: z.string().min(1).optional(),
  /** In place of `platform`. Its device's memory is host memory here. */
  platformModule: z.string().min(1).optional(),
  /** The kind by which plans treat this engine's cache. Default: `full`. */
  cacheKindModule: z.string().min(1).optional(),
  /** Default: as many as the cache has. */
  stagingBlocks: count.min(2).optional(),
  /** In each direction; 7.6 GB/s were reported for trn1 (vllm-neuron PR 27). */
  deviceBytesPerMs: z.number().positive().default(7.6e6),
  deviceLatencyMs: z.number().nonnegative().default(0.05),
  /** Announced to peers for the order inside a head, which is plain `[K|V]`. */
  attentionBackend: z.string().min(1).default("PLAIN"),
  /** vLLM's `kv_transfer_config`. */
  kvTransferConfig: z.record(z.string(), z.unknown()),
  /** Default: `VLLM_NIXL_SIDE_CHANNEL_HOST`, else 127.0.0.1. */
  sideChannelHost: z.string().min(1).optional(),
  /** Of data-parallel rank 0. Default: `VLLM_NIXL_SIDE_CHANNEL_PORT`, else 0: free ones. */
  sideChannelPort: port.optional(),
  /**
   * Of data-parallel rank 0, at `host`: a member of vLLM's P2P tier that serves the
   * prefix cache, and fills it from the `remote_kv_source` of requests. Default: none.
   */
  tierPort: port.optional(),
  compat: compatSchema.prefault({}),
  digests: z.boolean().default(false),
  httpLimits: httpLimitsSchema.default({}),
  /** Send clients the messages of failures inside the deployment, which may name hosts. */
  exposeErrors: z.boolean().default(false),
  /** Accept `demo_zero_block`, and vLLM's routes of sleep mode. */
  debug: z.boolean().default(false),
  /** A model that takes time but computes nothing, for benchmarks. */
  simulate: z
    .strictObject({
      forwardMsPer512Tokens: z.number().nonnegative(),
      leastPassMs: z.number().nonnegative().optional(),
      layers: count.max(256),
      kvHeads: count.max(256),
      headDim: count.max(1024),
      maxModelLen: count,
    })
    .optional(),
  fragmented: z.boolean().default(false),
  /** After SIGTERM: how long running requests, and blocks that a peer is to read, may take. */
  graceMs: z.number().nonnegative().default(30_000),
});

export type InstanceConfigInput = z.input<typeof instanceConfigSchema>;
export type InstanceConfig = z.output<typeof instanceConfigSchema>;

/**
 * Validates settings.
 * @throws `KV_CONFIG_UNKNOWN_KEY`, `KV_CONFIG_INVALID`, naming each invalid setting.
 */
export function readInstanceConfig(value: unknown): InstanceConfig {
  const parsed = instanceConfigSchema.safeParse(value, { error: unknownKeys });
  if (parsed.success) return parsed.data;
  const unknown = parsed.error.issues.some(({ code }) => code === "unrecognized_keys");
  throw new KvError(
    unknown ? "KV_CONFIG_UNKNOWN_KEY" : "KV_CONFIG_INVALID",
    `the instance's settings are not valid: ${z.prettifyError(parsed.error)}`,
  );
}

/**
 * The `kv_transfer_config` of an instance. A variable that a setting overrides causes a warning.
 * @throws The errors of `readTransferConfig`.
 */
export function transferConfigOf(
  { kvTransferConfig, sideChannelHost, sideChannelPort }: InstanceConfig,
  { env, log }: { readonly env: Readonly<Record<string, string | undefined>>; readonly log: Log },
): KvTransferConfig {
  const resolved = (variable: string, setting: string, given: unknown, usual: string) => {
    const value = env[variable] || undefined;
    if (given === undefined) return { [variable]: value ?? usual };
    const used = String(given);
    if (value !== undefined && value !== used) {
      const reason = `${setting} is set`;
      log.warn("setting-not-used", { key: variable, value, used, reason });
    }
    return { [variable]: used };
  };
  return readTransferConfig(kvTransferConfig, {
    log,
    env: {
      ...env,
      ...resolved("VLLM_NIXL_SIDE_CHANNEL_HOST", "sideChannelHost", sideChannelHost, "127.0.0.1"),
      ...resolved("VLLM_NIXL_SIDE_CHANNEL_PORT", "sideChannelPort", sideChannelPort, "0"),
    },
  });
}
