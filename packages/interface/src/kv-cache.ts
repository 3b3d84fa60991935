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
  /** Tokens in a logical block of this group, where groups differ. Default: `KvCacheConfig.blockSize`. */
  readonly blockSize?: number | undefined;
  /** KV heads of the whole model in this group's layers, where groups differ. Default: `KvCacheConfig.numKvHeads`. */
  readonly numKvHeads?: number | undefined;
  /** Tokens that a sliding window sees: only blocks that hold some of the last ones are handed over. */
  readonly slidingWindowTokens?: number | undefined;
  /** State groups: blocks at the end of a request's list that are scratch for speculation. Default 0. */
  readonly speculativeBlocks?: number | undefined;
}

/** One contiguous array of blocks: commonly a layer, with K and V packed. */
export interface KvCacheRegion {
  /** The layer's name; equal on both sides of a pair. Of a cache in several segments (a head each in LHBNC) each region has it. */
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
  /** For a shared region (-1), the groups that share it; all by default. */
  readonly groupIds?: readonly number[] | undefined;
  /** KV heads of the whole model in this region, where they are not its group's: a draft model's. */
  readonly numKvHeads?: number | undefined;
  /** The same on every rank. Default: as the kind of its group. */
  readonly replicated?: boolean | undefined;
}

/** A state-space layer's block on one rank: the convolution state, its projections one after another, then the recurrent state. */
export interface KvStateSpace {
  /** One for Mamba 1 (x), three for Mamba 2 (x, B, C) and gated delta nets (Q, K, V). */
  readonly convProjectionBytes: readonly number[];
  readonly recurrentBytes: number;
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
  /** Of models with state-space layers. */
  readonly stateSpace?: KvStateSpace | undefined;
  /** Whether the engine reuses blocks of earlier prompts. Default true; looked at for state-space models, which cannot with every peer. */
  readonly prefixCaching?: boolean | undefined;
}

/** A rank's part of the cache, handed to its worker connector once. */
export interface KvCaches {
  readonly config: KvCacheConfig;
  /** In natural order of layer names. */
  readonly regions: readonly KvCacheRegion[];
}

/** Block ids per KV cache group. */
export type BlockIds = readonly (readonly number[])[];
