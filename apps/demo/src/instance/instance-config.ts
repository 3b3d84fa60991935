import { readTransferConfig } from "@kv/connector";
import { KvError, type KvTransferConfig, type Log } from "@kv/interface";
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
  /**
   * The peer's attention backend, such as CPU_ATTN: the hash contains it, although this instance
   * announces another one.
   */
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
  /** Name in logs and reports. */
  name: z.string().min(1).optional(),
  host: z.string().min(1).default("127.0.0.1"),
  /** 0 takes a free one. */
  port: port.default(0),
  /** A directory with a decoder. Default: the built-in tiny model. */
  model: z.string().min(1).optional(),
  /** The model's name for clients. Default: the directory's name. */
  servedModelName: z.string().min(1).optional(),
  /** KV heads of the built-in model. */
  tinyKvHeads: count.optional(),
  intraOpThreads: count.default(1),
  tp: count.max(64).default(1),
  /**
   * Data-parallel ranks: engines that share the model and the HTTP server. `X-data-parallel-rank`
   * chooses one.
   */
  dp: count.max(64).default(1),
  blockSize: count.max(4096).default(16),
  numBlocks: count.min(2).default(512),
  /** Requests that hold blocks at the same time. Default: 64, or 1 on Neuron. */
  maxNumSeqs: count.optional(),
  /**
   * Tokens of a batch, at most: a longer prompt is computed in chunks (vLLM:
   * `max_num_batched_tokens`).
   */
  maxNumBatchedTokens: count.default(8192),
  /**
   * Batches that are computed at the same time, at most. Default: as many as the platform allows.
   */
  maxConcurrentBatches: count.optional(),
  /**
   * Longest sequence, prompt and output (vLLM: `max_model_len`). Default: the model's, or what the
   * cache holds if that is less.
   */
  maxModelLen: count.optional(),
  /** Default: true, or false on Neuron. */
  prefixCaching: z.boolean().optional(),
  /**
   * Where the KV cache lies. `cpu`: host memory. `cuda`: memory of NVIDIA GPUs, registered as it
   * is; the model still computes on the CPU. `neuron`: a simulated device whose blocks are staged
   * through host memory.
   */
  platform: z.enum(["cpu", "cuda", "neuron"]).default("cpu"),
  /**
   * EC2 instance type or family of the simulated device: on trn1 settings beyond its limits are
   * refused, on others they warn. Default: trn1.
   */
  neuronFamily: z.string().min(1).optional(),
  /** Module of a transport, in place of NIXL: a package, a path or a URL. */
  transportModule: z.string().min(1).optional(),
  /** Module of a platform, in place of `platform`. Its device's memory is host memory here. */
  platformModule: z.string().min(1).optional(),
  /**
   * Module of a kind of cache: the kind by which plans treat this engine's cache. Default: `full`.
   */
  cacheKindModule: z.string().min(1).optional(),
  /** Blocks of the staging pool. Default: as many as the cache has. */
  stagingBlocks: count.min(2).optional(),
  /**
   * Bandwidth of the simulated device's bus in each direction; 7.6 GB/s were reported for trn1
   * (vllm-neuron PR 27).
   */
  deviceBytesPerMs: z.number().positive().default(7.6e6),
  deviceLatencyMs: z.number().nonnegative().default(0.05),
  /** Announced to peers as the name of the order inside a head, which is plain `[K|V]`. */
  attentionBackend: z.string().min(1).default("PLAIN"),
  /** vLLM's `kv_transfer_config`. */
  kvTransferConfig: z.record(z.string(), z.unknown()),
  /** Default: `VLLM_NIXL_SIDE_CHANNEL_HOST`, else 127.0.0.1. */
  sideChannelHost: z.string().min(1).optional(),
  /**
   * Port of data-parallel rank 0; 0 takes free ones. Default: `VLLM_NIXL_SIDE_CHANNEL_PORT`, else
   * 0.
   */
  sideChannelPort: port.optional(),
  compat: compatSchema.prefault({}),
  /** Compute digests of sent and received KV, for `/kv/transfers`. */
  digests: z.boolean().default(false),
  /** Bounds of the HTTP server; see `HttpLimits`. Default: those of `httpLimits`. */
  httpLimits: httpLimitsSchema.default({}),
  /**
   * Send clients the messages of failures inside the deployment, which may name hosts and ports.
   * Default: only their code.
   */
  exposeErrors: z.boolean().default(false),
  /**
   * Accept `demo_zero_block`, and vLLM's routes of sleep mode: `POST /sleep`, `POST /wake_up`,
   * `GET /is_sleeping`.
   */
  debug: z.boolean().default(false),
  /** Replace the model by one that takes time but computes nothing, for benchmarks. */
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
  /** Use a block pool that avoids consecutive blocks, as after long use. */
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
  const parsed = instanceConfigSchema.safeParse(value);
  if (parsed.success) return parsed.data;
  const unknown = parsed.error.issues.some(({ code }) => code === "unrecognized_keys");
  throw new KvError(
    unknown ? "KV_CONFIG_UNKNOWN_KEY" : "KV_CONFIG_INVALID",
    `the instance's settings are not valid: ${z.prettifyError(parsed.error)}`,
  );
}

/**
 * The `kv_transfer_config` of an instance. The side channel's address is that of the instance's
 * settings, else of vLLM's variables, else a free port of 127.0.0.1. A variable that a setting
 * overrides causes a warning.
 * @throws The errors of `readTransferConfig`.
 */
export function transferConfigOf(
  { kvTransferConfig, sideChannelHost, sideChannelPort }: InstanceConfig,
  { env, log }: { readonly env: Readonly<Record<string, string | undefined>>; readonly log: Log },
): KvTransferConfig {
  const resolve = (
    name: string,
    setting: string,
    given: string | undefined,
    usual: string,
  ): string => {
    const variable = env[name] || undefined;
    if (given === undefined) return variable ?? usual;
    if (variable !== undefined && variable !== given)
      log.warn("setting-not-used", {
        key: name,
        value: variable,
        used: given,
        reason: `${setting} is set`,
      });
    return given;
  };
  return readTransferConfig(kvTransferConfig, {
    log,
    env: {
      ...env,
      VLLM_NIXL_SIDE_CHANNEL_HOST: resolve(
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "sideChannelHost",
        sideChannelHost,
        "127.0.0.1",
      ),
      VLLM_NIXL_SIDE_CHANNEL_PORT: resolve(
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "sideChannelPort",
        sideChannelPort === undefined ? undefined : String(sideChannelPort),
        "0",
      ),
    },
  });
}
