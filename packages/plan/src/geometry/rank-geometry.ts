import type { KvCacheKind, KvCacheLayout, MemoryType } from "@kv/interface";

/**
 * The `groupId` of a region whose blocks belong to several KV cache groups (vLLM:
 * `region_group_ids`).
 */
export const SHARED_REGION = -1;

/** One array of blocks on one rank, as the handshake describes it. */
export interface RegionGeometry {
  /**
   * Name of the layer or cache. Both sides name the same regions in the same order; of pipeline
   * stages regions are matched by name.
   */
  readonly name: string;
  /** Address of the first block, in bytes. */
  readonly baseAddress: number;
  /** Kernel blocks in the region. */
  readonly numBlocks: number;
  /** Bytes of a kernel block, without padding. */
  readonly blockLengthBytes: number;
  /** Bytes from the begin of one kernel block to the next; at least `blockLengthBytes`. */
  readonly blockStrideBytes: number;
  /**
   * Index of the KV cache group whose blocks lie in the region; -1 where several groups share it.
   */
  readonly groupId: number;
  /** Memory that holds the region. */
  readonly memoryType: MemoryType;
  /** For a shared region (-1): the groups that share it. @default all groups */
  readonly groupIds?: readonly number[] | undefined;
  /**
   * KV heads of the whole model in this region, where they differ from the model's: a draft model,
   * or layers with fewer heads.
   */
  readonly numKvHeads?: number | undefined;
  /**
   * Bytes of K and V of one head and token, or of a latent, where they are known. A block of
   * another length than heads × tokens of these is padded or packed: it is only moved whole.
   */
  readonly cellBytes?: number | undefined;
  /**
   * Every rank holds the same bytes, and one rank is read: MLA's latents, an indexer's keys.
   * @default by the kind of its group
   */
  readonly replicated?: boolean | undefined;
  /**
   * Names of the caches that lie in the region. Regions of pipeline stages are matched by them.
   * @default name
   */
  readonly members?: readonly string[] | undefined;
  /** NUMA node or device number of the region. @default the rank's `deviceId` */
  readonly deviceId?: number | undefined;
}

/**
 * The place of one cache in a row that packs several layers: a page of each of the region's blocks.
 */
export interface PackedMember {
  /** Bytes from the begin of a row to the page. */
  readonly offsetBytes: number;
  /** Bytes of the page. */
  readonly lengthBytes: number;
}

/**
 * The block of a state-space layer on one rank: the convolution state, its projections one after
 * another, then the recurrent state.
 */
export interface StateSpaceGeometry {
  /**
   * Bytes of each projection: one for Mamba 1 (x), three for Mamba 2 (x, B, C) and gated delta nets
   * (Q, K, V). A handshake has sums only.
   */
  readonly convProjectionBytes?: readonly number[] | undefined;
  /** Bytes of the convolution state: the sum of its projections. */
  readonly convBytes: number;
  /** Bytes of the recurrent state. */
  readonly recurrentBytes: number;
}

/**
 * The KV cache of one rank, as the handshake describes it. The local rank is described in the same
 * way.
 */
export interface RankGeometry {
  /** Tensor-parallel rank. */
  readonly tpRank: number;
  /** Tensor-parallel size of the engine. */
  readonly tpSize: number;
  /** Ranks that share a sequence by decode context parallelism. @default 1 */
  readonly dcpSize?: number | undefined;
  /** Tokens in a kernel block (vLLM: `block_size` of the handshake metadata). */
  readonly kernelBlockSize: number;
  /** Kernel blocks in a logical block. Block ids of requests are logical. */
  readonly physicalBlocksPerLogical: number;
  /** Order of layers, blocks, heads and tokens in memory. */
  readonly layout: KvCacheLayout;
  /** Name of the attention backend, such as "FLASH_ATTN". */
  readonly attentionBackend: string;
  /** Device number that descriptors carry. */
  readonly deviceId: number;
  /** All regions of the rank. */
  readonly regions: readonly RegionGeometry[];
  /** Pipeline stage; the regions are those of the stage's layers. @default 0 */
  readonly ppRank?: number | undefined;
  /** Pipeline stages of the engine. @default 1 */
  readonly ppSize?: number | undefined;
  /** Sizes of a state-space layer's block. Required where a group is of a state-space kind. */
  readonly stateSpace?: StateSpaceGeometry | undefined;
  /**
   * Pages within the rows of a region that packs several layers, by cache name (vLLM:
   * `packed_member_layouts`).
   */
  readonly packedMembers?: Readonly<Record<string, PackedMember>> | undefined;
  /**
   * Tokens in a logical block of each group, where groups differ. @default kernelBlockSize *
   * physicalBlocksPerLogical
   */
  readonly groupBlockTokens?: readonly number[] | undefined;
}

/** The facts of a model that both engines must agree on. The compatibility hash covers them. */
export interface ModelGeometry {
  /** KV heads of the whole model. Ignored for MLA. */
  readonly numKvHeads: number;
  /** Kind of each KV cache group, in the order of the block ids of a request. */
  readonly groups: readonly KvCacheKind[];
  /** KV heads of each group, where groups differ. @default `numKvHeads` for all */
  readonly groupKvHeads?: readonly number[] | undefined;
  /**
   * Type of the cache, as vLLM names it (`--kv-cache-dtype`). Blocks of a type that does not keep
   * heads and tokens apart, such as "nvfp4", are only moved whole, and so are those of an unknown
   * type. "auto" is the type of the model's elements. @default "auto"
   */
  readonly cacheDtype?: string | undefined;
}
