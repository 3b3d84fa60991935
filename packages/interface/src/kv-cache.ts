import type { Memory, MemoryType } from "./transport.js";

/**
 * Order of the dimensions of a layer's cache, by vLLM's letters: L layer, B block, H head, N token in the block, C content
 * (K and V of one head and token, packed). `LBHNC` is HND, `LBNHC` is NHD.
 */
export const KV_CACHE_LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"] as const;
export type KvCacheLayout = (typeof KV_CACHE_LAYOUTS)[number];

/** Kinds of cache that the layers of a group hold: those that `@kv/plan` has a file for. */
export const KV_CACHE_KINDS = ["full", "mla", "swa", "swa-mla", "mamba", "circular"] as const;
/** Open, so that a kind can be added where it is described (`packages/plan/src/kinds`); plans refuse a name that they do not know. */
export type KvCacheKind = (typeof KV_CACHE_KINDS)[number] | (string & {});

/** Layers that share one block table. Block ids of a request are given per group. */
export interface KvCacheGroup {
  readonly kind: KvCacheKind;
  readonly layerNames: readonly string[];
}

/** One contiguous array of blocks: commonly a layer, with K and V packed. */
export interface KvCacheRegion {
  /** The layer's name; equal on both sides of a pair. */
  readonly name: string;
  /** The memory that holds it, and where it begins in there. */
  readonly memory: Memory;
  readonly offsetBytes: number;
  readonly numBlocks: number;
  readonly blockLengthBytes: number;
  /** From one block's begin to the next one's; at least `blockLengthBytes`. */
  readonly blockStrideBytes: number;
  /** Index into `KvCacheConfig.groups`; -1 for a region that several groups share. */
  readonly groupId: number;
  readonly memoryType: MemoryType;
}

/** What an engine's KV cache is, the same for all of its ranks. */
export interface KvCacheConfig {
  readonly groups: readonly KvCacheGroup[];
  /** Tokens in a logical block. */
  readonly blockSize: number;
  /** Kernel blocks in a logical block; 1 unless the attention kernel wants smaller ones. */
  readonly physicalBlocksPerLogical: number;
  /** KV heads of the whole model, before any split or replication. */
  readonly numKvHeads: number;
  readonly headSize: number;
  readonly numHiddenLayers: number;
  /** As vLLM writes it, such as "torch.float32". */
  readonly dtype: string;
  /** "auto" when the cache has the model's dtype. */
  readonly cacheDtype: string;
  readonly layout: KvCacheLayout;
  /**
   * Names the order inside a head. Peers with equal names must order it alike: vLLM's CPU_ATTN has an order of its own;
   * plain `[K|V]` per token goes under another name and is repacked by a vLLM decode worker on the CPU.
   */
  readonly attentionBackend: string;
}

/** A rank's part of the cache, handed to its worker connector once. */
export interface KvCaches {
  readonly config: KvCacheConfig;
  /** In natural order of layer names. */
  readonly regions: readonly KvCacheRegion[];
}

/** Block ids per KV cache group. */
export type BlockIds = readonly (readonly number[])[];
