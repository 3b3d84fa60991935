import { KvError } from "@kv/interface";
import { z } from "zod";

const INSTANCE_ROLES = ["prefill", "decode", "both"] as const;
export type InstanceRole = (typeof INSTANCE_ROLES)[number];

const count = z.number().int().positive();
const port = z.number().int().min(0).max(65_535);

/** What the engine says of the model in the compatibility hash, for pairs with vLLM; the defaults are those of vLLM 0.33. */
const compatSchema = z.strictObject({
  /** As the peer's `--model` was given. */
  model: z.string().optional(),
  vllmVersion: z.string().default("0.33.0"),
  connectorVersion: count.default(15),
  isHmaEnabled: z.boolean().default(true),
  /** The peer's own attention backend, such as CPU_ATTN: it is part of the hash, though the layout announced here is another. */
  attentionBackend: z.string().optional(),
});

const instanceConfigSchema = z.strictObject({
  role: z.enum(INSTANCE_ROLES),
  /** For logs and reports. */
  name: z.string().min(1).optional(),
  host: z.string().min(1).default("127.0.0.1"),
  /** 0 takes a free one. */
  port: port.default(0),
  /** A directory with a decoder; the built-in tiny model when absent. */
  model: z.string().min(1).optional(),
  /** Names under which clients know it; the directory's by default. */
  servedModelName: z.string().min(1).optional(),
  /** KV heads of the built-in model. */
  tinyKvHeads: count.optional(),
  intraOpThreads: count.default(1),
  tp: count.max(64).default(1),
  blockSize: count.max(4096).default(16),
  numBlocks: count.min(2).default(512),
  /** 64, or 1 where the platform can do no more. */
  maxNumSeqs: count.optional(),
  /** On, or off where the platform cannot. */
  prefixCaching: z.boolean().optional(),
  /** What the engine runs on: the CPU, or a simulated Neuron device whose blocks are staged through host memory. */
  platform: z.enum(["cpu", "neuron"]).default("cpu"),
  /** Blocks of the staging pool; as many as the cache has when absent. */
  stagingBlocks: count.min(2).optional(),
  /** The simulated device's bus, each way; 7.6 GB/s were reported of trn1 (vllm-neuron PR 27). */
  deviceBytesPerMs: z.number().positive().default(7.6e6),
  deviceLatencyMs: z.number().nonnegative().default(0.05),
  /** Announced to peers for the order inside a head, which is plain `[K|V]` here. */
  attentionBackend: z.string().min(1).default("PLAIN"),
  /** vLLM's own `kv_transfer_config`. */
  kvTransferConfig: z.record(z.string(), z.unknown()),
  sideChannelHost: z.string().min(1).default("127.0.0.1"),
  /** 0 takes a free one. */
  sideChannelPort: port.default(0),
  compat: compatSchema.prefault({}),
  /** Hash what is sent and received, for `/kv/transfers`. */
  digests: z.boolean().default(false),
  /** Take `kv_demo_zero_block`. */
  debug: z.boolean().default(false),
  /** In place of the model one that takes time and computes nothing, to measure what is around it. */
  simulate: z
    .strictObject({
      forwardMsPer512Tokens: z.number().nonnegative(),
      layers: count.max(256),
      kvHeads: count.max(256),
      headDim: count.max(1024),
      maxModelLen: count,
    })
    .optional(),
  /** A pool in which no two neighbours go to one request. */
  fragmented: z.boolean().default(false),
  /** What SIGTERM leaves requests, and blocks that a peer is to read, to end by themselves. */
  graceMs: z.number().nonnegative().default(30_000),
});

export type InstanceConfigInput = z.input<typeof instanceConfigSchema>;
export type InstanceConfig = z.output<typeof instanceConfigSchema>;

/** Errors: `KV_CONFIG_UNKNOWN_KEY`, `KV_CONFIG_INVALID`, naming each setting that is wrong. */
export function readInstanceConfig(given: unknown): InstanceConfig {
  const parsed = instanceConfigSchema.safeParse(given);
  if (parsed.success) return parsed.data;
  const unknown = parsed.error.issues.some(({ code }) => code === "unrecognized_keys");
  throw new KvError(
    unknown ? "KV_CONFIG_UNKNOWN_KEY" : "KV_CONFIG_INVALID",
    `the instance's settings are not valid: ${z.prettifyError(parsed.error)}`,
  );
}
