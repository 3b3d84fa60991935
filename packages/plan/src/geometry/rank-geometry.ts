import type { KvCacheKind, KvCacheLayout, MemoryType } from "@kv/interface";

/** `groupId` of a region that several KV cache groups share (vLLM: `region_group_ids`). */
export const SHARED_REGION = -1;

/** One array of blocks on one rank, as in the handshake. */
export interface RegionGeometry {
  /** Both sides list equal names in equal order; only pipeline stages match by name. */
  readonly name: string;
  readonly baseAddress: number;
  readonly numBlocks: number;
  /** Bytes of a kernel block without padding. */
  readonly blockLengthBytes: number;
  /** Distance between the starts of blocks; at least `blockLengthBytes`. */
  readonly blockStrideBytes: number;
  /** KV cache group; -1 where several share the region. */
  readonly groupId: number;
  readonly memoryType: MemoryType;
  /** The groups that share a region (-1). @default all groups */
  readonly groupIds?: readonly number[] | undefined;
  /** KV heads of the region, where they differ from the model's, as in a draft model. */
  readonly numKvHeads?: number | undefined;
  /**
   * Bytes of K and V of one head and token, or of a latent. A block that is not heads × tokens of
   * these is padded or packed, so it only moves whole.
   */
  readonly cellBytes?: number | undefined;
  /**
   * Every rank holds the same bytes, so one is read: MLA latents, indexer keys.
   * @default by the kind of its group
   */
  readonly replicated?: boolean | undefined;
  /**
   * Caches in the region, by which pipeline stages match.
   * @default name
   */
  readonly members?: readonly string[] | undefined;
  /** NUMA node or device number. @default the rank's `deviceId` */
  readonly deviceId?: number | undefined;
}

/** One cache in a row that packs several layers: a page of each block. */
export interface PackedMember {
  readonly offsetBytes: number;
  readonly lengthBytes: number;
}

/**
 * A state-space layer's block on one rank: the projections of the convolution state, then the
 * recurrent state.
 */
export interface StateSpaceGeometry {
  /**
   * Bytes of each projection: one for Mamba 1 (x), three for Mamba 2 (x, B, C) and gated delta nets
   * (Q, K, V). A handshake has only sums.
   */
  readonly convProjectionBytes?: readonly number[] | undefined;
  readonly convBytes: number;
  readonly recurrentBytes: number;
}

/** The KV cache of one rank, as the handshake describes it. */
export interface RankGeometry {
  readonly tpRank: number;
  readonly tpSize: number;
  /** @default 1 */
  readonly dcpSize?: number | undefined;
  /** Tokens in a kernel block (vLLM: `block_size` of the handshake metadata). */
  readonly kernelBlockSize: number;
  /** Kernel blocks in a logical block. Requests have logical block ids. */
  readonly physicalBlocksPerLogical: number;
  readonly layout: KvCacheLayout;
  readonly attentionBackend: string;
  /** Device number in descriptors. */
  readonly deviceId: number;
  readonly regions: readonly RegionGeometry[];
  /** `regions` are those of this stage's layers. @default 0 */
  readonly ppRank?: number | undefined;
  /** @default 1 */
  readonly ppSize?: number | undefined;
  /** Required where a group is of a state-space kind. */
  readonly stateSpace?: StateSpaceGeometry | undefined;
  /**
   * By cache: its page in the rows of a region that packs several layers (vLLM:
   * `packed_member_layouts`).
   */
  readonly packedMembers?: Readonly<Record<string, PackedMember>> | undefined;
  /**
   * Tokens in a logical block of each group, where they differ. @default kernelBlockSize *
   * physicalBlocksPerLogical
   */
  readonly groupBlockTokens?: readonly number[] | undefined;
}

/** What both engines must agree on about a model. */
export interface ModelGeometry {
  /** KV heads of the whole model. Ignored for MLA. */
  readonly numKvHeads: number;
  /** Kind of each KV cache group, in the order of a request's block ids. */
  readonly groups: readonly KvCacheKind[];
  /** KV heads by group, where they differ. @default `numKvHeads` for all */
  readonly groupKvHeads?: readonly number[] | undefined;
  /**
   * Type of the cache, as vLLM names it (`--kv-cache-dtype`); "auto" is the model's. Types that mix
   * heads and tokens, such as "nvfp4", and unknown ones only move whole. @default "auto"
   */
  readonly cacheDtype?: string | undefined;
}
