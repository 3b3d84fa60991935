import { type KvCacheKind, KvError } from "@kv/interface";
import type { EngineFlags } from "../input/engine-flags.js";
import type { ModelSource } from "../input/model-source.js";
import { kindOf, pairOfModels } from "../input/pair-from-model.js";
import { type CacheSpec, pageBytes, unpaddedPageBytes } from "../model/cache-spec.js";
import type { CacheGroup } from "../model/kv-cache-groups.js";
import type { ModelCaches } from "../model/model-caches.js";
import { postingOf } from "../report/posting.js";
import { estimateWeights } from "./estimate-weights.js";

/** One engine: `dpSize` replicas of `tpSize` GPUs. */
export interface SizeSettings {
  readonly tpSize: number;
  /** Replicas of the attention, each with its own cache (`--data-parallel-size`). */
  readonly dpSize: number;
  /** Bytes of one GPU. */
  readonly memoryBytes: number;
  /** vLLM's `gpu_memory_utilization`. */
  readonly utilization: number;
  /** Bytes of the whole checkpoint. Default: estimated from the config. */
  readonly weightsBytes?: number | undefined;
  /** Bytes that activations, CUDA graphs and libraries take of one GPU, which vLLM measures. */
  readonly otherBytes: number;
  /** Tokens of a request, prompt and output: vLLM's `max_model_len`. */
  readonly requestTokens: number;
  /** vLLM's `max_num_batched_tokens`. Default: vLLM's for a GPU of this size. */
  readonly batchedTokens?: number | undefined;
  /** Of one GPU's link, in GB/s. */
  readonly bandwidthGBps: number;
}

/** Layers that share a block table, on one GPU. */
export interface GroupSize {
  readonly kind: KvCacheKind;
  readonly layers: number;
  readonly blockTokens: number;
  /** Bytes that each further token takes; 0 for windows, chunks and states. */
  readonly tokenBytes: number;
  /** Blocks that vLLM reserves for a request of `requestTokens`. */
  readonly requestBlocks: number;
  /** Bytes of the group's own pages in these blocks. */
  readonly requestBytes: number;
}

export interface SizeReport {
  readonly title: string;
  readonly plannedFrom: string;
  readonly settings: SizeSettings & { readonly batchedTokens: number };
  readonly groups: readonly GroupSize[];
  /** Bytes of one GPU. `isEstimate`: from the config; the weights were not given. */
  readonly memory: {
    readonly weightsBytes: number;
    readonly isEstimate: boolean;
    readonly otherBytes: number;
    readonly cacheBytes: number;
    readonly unusedBytes: number;
  };
  /** Of one replica, as vLLM computes and logs them when it starts. */
  readonly pool: {
    readonly blockBytes: number;
    readonly blocks: number;
    readonly requestBlocks: number;
    /** vLLM: "GPU KV cache size". */
    readonly tokens: number;
    /** vLLM: "Maximum concurrency". */
    readonly concurrency: number;
  };
  /** Of all replicas. */
  readonly tokens: number;
  readonly concurrency: number;
  /** One request to a decode rank of an equal engine; null where it cannot be handed over. */
  readonly handover: {
    readonly lengthBytes: number;
    readonly descriptors: number;
    /** What remains after NIXL merges neighbours. */
    readonly merged: number;
    readonly transferMs: number;
  } | null;
  readonly assumed: readonly string[];
}

const GIB = 2 ** 30;
/** vLLM's utilization, and what an H100 with CUDA graphs often needs beside weights and cache. */
export const SIZE_DEFAULTS = { utilization: 0.92, otherBytes: 3 * GIB } as const;
/** Batches that vLLM schedules before the first of them ends. */
const BATCHES_IN_FLIGHT = 2;

/**
 * How many tokens and requests fit (vLLM 0.33: `get_kv_cache_capacity`).
 * @throws `KV_CONFIG_INVALID` where the weights are unknown or leave no memory; the errors of
 * `modelCaches`.
 */
export function sizeReport(
  model: ModelSource,
  config: unknown,
  settings: SizeSettings,
  flags: Pick<EngineFlags, "blockSize" | "layout">,
): SizeReport {
  const { tpSize, dpSize, memoryBytes, otherBytes, requestTokens } = settings;
  const caches = model.caches({
    tpSize,
    blockSize: flags.blockSize[0],
    layout: flags.layout[0],
  });
  const batchedTokens = settings.batchedTokens ?? defaultBatch(memoryBytes);
  const inFlight = BATCHES_IN_FLIGHT * batchedTokens;
  const groups = caches.groups.map((group) => groupSize(group, caches, requestTokens, inFlight));
  const weights = weightsOf(model.name, config, settings);
  const wanted = Math.floor(memoryBytes * settings.utilization);
  const cacheBytes = wanted - weights.bytes - otherBytes;
  if (cacheBytes < caches.bytesPerBlock)
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${model.name}: ${weights.bytes} bytes of weights and ${otherBytes} of activations leave no block of ${caches.bytesPerBlock} bytes in ${wanted} bytes of a GPU`,
      { hint: "give a larger --tp or --memory, or the measured bytes with --weights and --other" },
    );
  const blocks = Math.floor(cacheBytes / caches.bytesPerBlock);
  const requestBlocks = groups.reduce((sum, group) => sum + group.requestBlocks, 0);
  const concurrency = blocks / requestBlocks;
  const tokens = Math.floor(concurrency * requestTokens);
  return {
    title: `${model.name}: TP ${tpSize}${dpSize === 1 ? "" : `, DP ${dpSize}`}`,
    plannedFrom: model.plannedFrom,
    settings: { ...settings, batchedTokens },
    groups,
    memory: {
      weightsBytes: weights.bytes,
      isEstimate: weights.isEstimate,
      otherBytes,
      cacheBytes,
      unusedBytes: memoryBytes - wanted,
    },
    pool: { blockBytes: caches.bytesPerBlock, blocks, requestBlocks, tokens, concurrency },
    tokens: tokens * dpSize,
    concurrency: concurrency * dpSize,
    handover: handoverOf(model, settings, flags),
    assumed: caches.assumed,
  };
}

/** vLLM's for a server (`EngineArgs.get_batch_defaults`). */
function defaultBatch(memoryBytes: number): number {
  if (memoryBytes >= 160 * GIB) return 16_384;
  return memoryBytes >= 70 * GIB ? 8192 : 2048;
}

function groupSize(
  group: CacheGroup,
  caches: ModelCaches,
  requestTokens: number,
  inFlight: number,
): GroupSize {
  const { layers, blockSize } = group;
  const kind = kindOf(group);
  const blocks = layers.map(({ spec }) => blocksOfRequest(spec, caches, requestTokens, inFlight));
  const requestBlocks = Math.max(...blocks);
  const bytes = layers.reduce((sum, { spec }) => sum + pageBytes(spec), 0);
  const grows = kind === "full" || kind === "mla";
  const isChunk = layers.some(({ spec }) => spec.class === "ChunkedLocalAttentionSpec");
  return {
    kind,
    layers: layers.length,
    blockTokens: blockSize,
    tokenBytes:
      grows && !isChunk
        ? layers.reduce((sum, { spec }) => sum + unpaddedPageBytes(spec) / spec.blockSize, 0)
        : 0,
    requestBlocks,
    requestBytes: requestBlocks * bytes,
  };
}

/** vLLM's `max_memory_usage_bytes` in pages. */
function blocksOfRequest(
  spec: CacheSpec,
  { blockSize, stateBlockSize }: ModelCaches,
  requestTokens: number,
  inFlight: number,
): number {
  const upTo = (tokens: number) => Math.ceil(Math.min(tokens, requestTokens) / spec.blockSize);
  switch (spec.class) {
    case "MambaSpec":
      // With prefix caching: the state before, the one that is written, and checkpoints.
      return stateBlockSize === blockSize ? 2 + (spec.checkpointBlocks ?? 0) : 1;
    case "SlidingWindowSpec":
    case "SlidingWindowMLASpec":
      return upTo((spec.slidingWindow ?? 0) - 1 + inFlight) + 1;
    case "ChunkedLocalAttentionSpec":
      return upTo((spec.attentionChunkSize ?? 0) + inFlight);
    case "CrossAttentionSpec":
      throw new KvError(
        "KV_PLAN_UNSUPPORTED",
        "the encoder's cache is as long as the encoder's input, which the config does not say",
        { hint: "kv-plan size is for decoder models" },
      );
    default:
      return upTo(requestTokens);
  }
}

function weightsOf(
  name: string,
  config: unknown,
  { weightsBytes, tpSize, dpSize }: SizeSettings,
): { readonly bytes: number; readonly isEstimate: boolean } {
  const estimate = estimateWeights(config);
  const whole = weightsBytes ?? estimate?.bytes;
  if (whole === undefined)
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${name}: the config does not say how large the weights are`,
      { hint: "give their bytes, such as --weights 140GiB (total_size of the safetensors index)" },
    );
  // vLLM spreads experts over all GPUs, and holds the rest once in each replica.
  const experts = whole * (estimate?.expertShare ?? 0);
  return {
    bytes: Math.ceil((whole - experts) / tpSize + experts / (tpSize * dpSize)),
    isEstimate: weightsBytes === undefined,
  };
}

/** @throws Other errors than a refusal of the pair. */
function handoverOf(
  model: ModelSource,
  settings: SizeSettings,
  { blockSize, layout }: Pick<EngineFlags, "blockSize" | "layout">,
): SizeReport["handover"] {
  const { tpSize, requestTokens, bandwidthGBps } = settings;
  try {
    const pair = pairOfModels([model, model], {
      blockSize,
      layout,
      tp: [tpSize],
      pp: [],
      kernelBlockSize: [],
      backend: [],
      numBlocks: [2 ** 24],
    });
    const { descriptors, merged, lengthBytes } = postingOf(pair, requestTokens);
    return { lengthBytes, descriptors, merged, transferMs: lengthBytes / (bandwidthGBps * 1e6) };
  } catch (error) {
    if (KvError.is(error) && error.code.startsWith("KV_PLAN_")) return null;
    throw error;
  }
}
