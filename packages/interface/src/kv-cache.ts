import type { MemoryType } from "./descriptors.js";
import type { Memory } from "./transport.js";

/**
 * Names of cache layouts, as vLLM 0.33 writes them: the dimensions, outermost first. L is layer, B
 * block, H head, N token in the block, C content (K and V of one head and token, packed). `LBHNC`
 * is vLLM's HND, `LBNHC` its NHD.
 */
export const KV_CACHE_LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"] as const;
/** One of `KV_CACHE_LAYOUTS`. */
export type KvCacheLayout = (typeof KV_CACHE_LAYOUTS)[number];

/**
 * Kinds of cache that `@kv/plan` can transfer: full attention, multi-head latent attention, sliding
 * windows of either, state spaces and circular buffers.
 */
export const KV_CACHE_KINDS = ["full", "mla", "swa", "swa-mla", "mamba", "circular"] as const;
/** A kind of cache. The type is open for kinds that `@kv/plan` adds; plans reject unknown names. */
export type KvCacheKind = (typeof KV_CACHE_KINDS)[number] | (string & {});

/**
 * Layers that share one block table (vLLM: `KVCacheGroupSpec`). Requests have block ids by group.
 */
export interface KvCacheGroup {
  readonly kind: KvCacheKind;
  readonly layerNames: readonly string[];
  /** Tokens in a logical block. @default KvCacheConfig.blockSize */
  readonly blockSize?: number | undefined;
  /** KV heads of the whole model. @default KvCacheConfig.numKvHeads */
  readonly numKvHeads?: number | undefined;
  /** Length of the sliding window, whose blocks alone are transferred. Absent for other kinds. */
  readonly slidingWindowTokens?: number | undefined;
  /**
   * State groups: scratch blocks for speculative decoding at the end of a request's list. @default
   * 0
   */
  readonly speculativeBlocks?: number | undefined;
  /**
   * Whether peers exchange the group's blocks (vLLM 0.33: `enable_kv_transfer`). False: peers never
   * learn of the group and the engine fills its blocks itself, but block ids between engine and
   * connector list it. @default true
   */
  readonly enableKvTransfer?: boolean | undefined;
}

/** One array of blocks with a constant stride, usually one layer with K and V packed. */
export interface KvCacheRegion {
  /**
   * Name of the layer, equal on both sides. All regions of a layer share it (LHBNC: one for each
   * head).
   */
  readonly name: string;
  readonly memory: Memory;
  /** Offset of block 0 in `memory`. */
  readonly offsetBytes: number;
  readonly numBlocks: number;
  readonly blockLengthBytes: number;
  /** Distance between the starts of consecutive blocks, at least `blockLengthBytes`. */
  readonly blockStrideBytes: number;
  /** Index into `KvCacheConfig.groups`; -1 for a region that several groups share. */
  readonly groupId: number;
  readonly memoryType: MemoryType;
  /** For a shared region (`groupId` -1): its groups. @default all groups */
  readonly groupIds?: readonly number[] | undefined;
  /** KV heads, where they differ from the group's, as for a draft model. @default the group's */
  readonly numKvHeads?: number | undefined;
  /** Whether every rank holds the same content. @default the rule of the group's kind */
  readonly replicated?: boolean | undefined;
  /**
   * Bytes of K and V of one head and token, where `headSize` and the cache's type do not give them.
   * A block that is not heads × tokens of these has padding or scales: it only moves whole, between
   * peers of equal TP and block size.
   */
  readonly cellBytes?: number | undefined;
}

/**
 * Sizes of a state-space layer's block on one rank: the projections of the convolution state, then
 * the recurrent state.
 */
export interface KvStateSpace {
  /**
   * Bytes of each projection: one for Mamba 1 (x), three for Mamba 2 (x, B, C) and gated delta nets
   * (Q, K, V).
   */
  readonly convProjectionBytes: readonly number[];
  readonly recurrentBytes: number;
}

/** An engine's KV cache, equal for all its ranks (vLLM: `KVCacheConfig` and `CacheConfig`). */
export interface KvCacheConfig {
  readonly groups: readonly KvCacheGroup[];
  /** Tokens in a logical block. */
  readonly blockSize: number;
  /** 1 unless the attention kernel needs smaller blocks. */
  readonly physicalBlocksPerLogical: number;
  /** KV heads before tensor parallelism splits or replicates them. */
  readonly numKvHeads: number;
  /** Elements of K, or of V, of one head and token. */
  readonly headSize: number;
  readonly numHiddenLayers: number;
  /** vLLM's name, such as "torch.float32". */
  readonly dtype: string;
  /**
   * vLLM's name (`--kv-cache-dtype`); "auto" is the model's. Types that mix heads and tokens, such
   * as "nvfp4", and unknown ones only move whole, between peers of equal TP and block size.
   */
  readonly cacheDtype: string;
  readonly layout: KvCacheLayout;
  /**
   * The name stands for the byte order within a head, which peers with equal names must share.
   * vLLM's `CPU_ATTN` has its own; plain `[K|V]` per token needs another name, and a vLLM decode
   * worker on the CPU then repacks it.
   */
  readonly attentionBackend: string;
  /** Only state-space models have it. */
  readonly stateSpace?: KvStateSpace | undefined;
  /**
   * Tokens at a prompt's end that only the decode engine may compute, for more than states (vLLM
   * 0.33: `_prefill_backoff`, for bounded replay of sliding windows and multi-token prediction of
   * several modules). With states it is at least 1. Requests with these tokens prefilled are
   * refused; see `SchedulerConnector.tokensToPrefill`. @default 0
   */
  readonly prefillBackoffTokens?: number | undefined;
  /**
   * The engine reuses blocks of earlier prompts, which not every peer allows for state-space
   * models. @default true
   */
  readonly prefixCaching?: boolean | undefined;
}

/** One rank's part of the cache, whose memory the engine keeps owning. */
export interface KvCaches {
  readonly config: KvCacheConfig;
  readonly regions: readonly KvCacheRegion[];
}

/** Block ids of a request, one list for each KV cache group. */
export type BlockIds = readonly (readonly number[])[];
