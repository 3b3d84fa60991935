import type { MemoryType } from "./descriptors.js";
import type { Memory } from "./transport.js";
/**
 * Names of cache layouts, as vLLM 0.33 writes them: the order of the dimensions, outermost first. L
 * is layer, B block, H head, N token in the block, C content (K and V of one head and token,
 * packed). `LBHNC` is vLLM's HND, `LBNHC` its NHD.
 */
export declare const KV_CACHE_LAYOUTS: readonly ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"];
/** One of `KV_CACHE_LAYOUTS`. */
export type KvCacheLayout = (typeof KV_CACHE_LAYOUTS)[number];
/**
 * Kinds of cache that `@kv/plan` can transfer: full attention, multi-head latent attention, sliding
 * windows of either, state spaces, and circular buffers.
 */
export declare const KV_CACHE_KINDS: readonly ["full", "mla", "swa", "swa-mla", "mamba", "circular"];
/**
 * The kind of a cache group. The type is open so that a kind can be added in `packages/plan` alone;
 * plans reject names that they do not know.
 */
export type KvCacheKind = (typeof KV_CACHE_KINDS)[number] | (string & {});
/**
 * Layers that share one block table (vLLM: `KVCacheGroupSpec`). Block ids of a request are listed
 * per group.
 */
export interface KvCacheGroup {
    /** Kind of the layers' cache. */
    readonly kind: KvCacheKind;
    /** Names of the layers. */
    readonly layerNames: readonly string[];
    /** Tokens in a logical block of this group. @default KvCacheConfig.blockSize */
    readonly blockSize?: number | undefined;
    /** KV heads of the whole model in this group's layers. @default KvCacheConfig.numKvHeads */
    readonly numKvHeads?: number | undefined;
    /**
     * Length of the sliding window in tokens: only blocks that hold some of the last tokens are
     * transferred. Absent for other kinds.
     */
    readonly slidingWindowTokens?: number | undefined;
    /**
     * State groups: blocks at the end of a request's list that are scratch space for speculative
     * decoding. @default 0
     */
    readonly speculativeBlocks?: number | undefined;
    /**
     * Whether peers exchange the group's blocks (vLLM 0.33: `enable_kv_transfer`). False: no peer
     * gets to know of the group, and the engine fills its blocks itself, also where a peer supplies
     * the tokens. Block ids that pass between engine and connector list it all the same. @default
     * true
     */
    readonly enableKvTransfer?: boolean | undefined;
}
/** One array of blocks with a constant stride: usually one layer, with K and V packed. */
export interface KvCacheRegion {
    /**
     * Name of the layer, equal on both sides of a pair. Where a layer has several regions (one for
     * each head in LHBNC), each has this name.
     */
    readonly name: string;
    /** Memory that holds the region. */
    readonly memory: Memory;
    /** Offset of block 0 in `memory`. */
    readonly offsetBytes: number;
    /** Count of blocks. */
    readonly numBlocks: number;
    /** Bytes of one block. */
    readonly blockLengthBytes: number;
    /** Distance between the begins of two consecutive blocks; at least `blockLengthBytes`. */
    readonly blockStrideBytes: number;
    /** Index into `KvCacheConfig.groups`; -1 for a region that several groups share. */
    readonly groupId: number;
    /** Memory type under which the region is registered. */
    readonly memoryType: MemoryType;
    /** For a shared region (`groupId` -1): the groups that share it. @default all groups */
    readonly groupIds?: readonly number[] | undefined;
    /**
     * KV heads of the whole model in this region, where they differ from its group's, as for a draft
     * model. @default the group's
     */
    readonly numKvHeads?: number | undefined;
    /** Whether every rank holds the same content. @default the rule of the group's kind */
    readonly replicated?: boolean | undefined;
    /**
     * Bytes of K and V of one head and token, where `headSize` and the type of the cache do not give
     * them, as for V of another size than K. A block of another length than heads × tokens of these
     * has padding or scales in places of its own: it is only moved whole, so peers need equal TP and
     * block sizes.
     */
    readonly cellBytes?: number | undefined;
}
/**
 * Sizes of a state-space layer's block on one rank. The block holds the projections of the
 * convolution state, then the recurrent state.
 */
export interface KvStateSpace {
    /**
     * Bytes of each projection: one for Mamba 1 (x), three for Mamba 2 (x, B, C) and for gated delta
     * nets (Q, K, V).
     */
    readonly convProjectionBytes: readonly number[];
    /** Bytes of the recurrent state. */
    readonly recurrentBytes: number;
}
/**
 * Description of an engine's KV cache, equal for all of its ranks (vLLM: `KVCacheConfig` and
 * `CacheConfig`).
 */
export interface KvCacheConfig {
    /** Groups of layers. The index of a group is its id. */
    readonly groups: readonly KvCacheGroup[];
    /** Tokens in a logical block. */
    readonly blockSize: number;
    /** Kernel blocks in a logical block; 1 unless the attention kernel needs smaller blocks. */
    readonly physicalBlocksPerLogical: number;
    /** KV heads of the whole model, before tensor parallelism splits or replicates them. */
    readonly numKvHeads: number;
    /** Elements of K, or of V, of one head and token. */
    readonly headSize: number;
    /** Hidden layers of the whole model. */
    readonly numHiddenLayers: number;
    /** Type of the model's elements as vLLM writes it, such as "torch.float32". */
    readonly dtype: string;
    /**
     * Type of the cache as vLLM names it (`--kv-cache-dtype`); "auto" when it is the model's. Blocks
     * of types that do not keep heads and tokens apart, such as "nvfp4", and of types that `@kv/plan`
     * does not know, are only moved whole: peers need equal TP and block sizes.
     */
    readonly cacheDtype: string;
    /** Order of the dimensions. */
    readonly layout: KvCacheLayout;
    /**
     * Name of the attention backend, which stands for the order of the bytes within a head. Peers
     * with equal names must use the same order. vLLM's `CPU_ATTN` has an order of its own; plain
     * `[K|V]` per token needs another name, and a vLLM decode worker on the CPU then repacks it.
     */
    readonly attentionBackend: string;
    /** Sizes of the states. Present for models with state-space layers only. */
    readonly stateSpace?: KvStateSpace | undefined;
    /**
     * Tokens at the end of a prompt that only the decode engine may compute, where the cache has more
     * than its states to tell them (vLLM 0.33: `_prefill_backoff`, for the bounded replay of sliding
     * windows and for multi-token prediction of several modules). See
     * `SchedulerConnector.tokensToPrefill`; requests whose prefill engine has computed them are
     * refused. A cache with states has at least 1. @default 0
     */
    readonly prefillBackoffTokens?: number | undefined;
    /**
     * Whether the engine reuses blocks of earlier prompts. Only state-space models use it: they
     * cannot do so with every peer. @default true
     */
    readonly prefixCaching?: boolean | undefined;
}
/**
 * One rank's part of the cache. The engine passes it to `WorkerConnector.registerKvCaches` once and
 * keeps owning the memory.
 */
export interface KvCaches {
    /** The engine's KV cache. */
    readonly config: KvCacheConfig;
    /** Regions in the natural order of their layer names. */
    readonly regions: readonly KvCacheRegion[];
}
/** Block ids of a request, one list for each KV cache group. */
export type BlockIds = readonly (readonly number[])[];
