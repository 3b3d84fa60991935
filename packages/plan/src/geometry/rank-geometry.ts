import type { KvCacheKind, KvCacheLayout, MemoryType } from "@kv/interface";

/** The `groupId` of a region whose blocks belong to several KV cache groups. */
export const SHARED_REGION = -1;

/** One array of blocks on one rank, as the handshake tells it. */
export interface RegionGeometry {
  /** The layer's name; both sides name the same regions in the same order. */
  readonly name: string;
  readonly baseAddress: number;
  /** Kernel blocks in the region. */
  readonly numBlocks: number;
  readonly blockLengthBytes: number;
  /** From one block's begin to the next one's; at least `blockLengthBytes`. */
  readonly blockStrideBytes: number;
  /** Index of the KV cache group whose blocks live here; -1 for a region that several groups share. */
  readonly groupId: number;
  readonly memoryType: MemoryType;
  /** For a shared region (-1), the groups that share it, where it is known; else all of them. */
  readonly groupIds?: readonly number[];
  /** KV heads of the whole model in this region, where they are not the model's: a draft model's, or layers with fewer heads. */
  readonly numKvHeads?: number;
  /** The same on every rank, and read whole from one: MLA's latent vectors, an indexer's keys. Default: as the kind of its group. */
  readonly replicated?: boolean;
  /** The caches that lie in it, where there are several or they are not the name: what a pipeline stage is matched by. */
  readonly members?: readonly string[];
  /** NUMA or device number of this region, where it is not the rank's. */
  readonly deviceId?: number;
}

/** Where a member of a packed row lies: a page of each of the region's blocks. */
export interface PackedMember {
  readonly offsetBytes: number;
  readonly lengthBytes: number;
}

/** A state-space layer's block on one rank: the convolution state, its projections one after another, then the recurrent state. */
export interface StateSpaceGeometry {
  /** One for Mamba 1 (x), three for Mamba 2 (x, B, C) and gated delta nets (Q, K, V). Absent where only sums were told. */
  readonly convProjectionBytes?: readonly number[];
  readonly convBytes: number;
  readonly recurrentBytes: number;
}

/** A rank's cache, as the handshake tells it; the local rank describes itself in the same words. */
export interface RankGeometry {
  readonly tpRank: number;
  readonly tpSize: number;
  /** Default 1. */
  readonly dcpSize?: number;
  /** Tokens in a kernel block: vLLM's `block_size` in handshake metadata. */
  readonly kernelBlockSize: number;
  /** Kernel blocks in a logical block, the unit of block ids in requests. */
  readonly physicalBlocksPerLogical: number;
  readonly layout: KvCacheLayout;
  readonly attentionBackend: string;
  readonly deviceId: number;
  readonly regions: readonly RegionGeometry[];
  /** Pipeline stage; its regions are those of its own layers. Default 0. */
  readonly ppRank?: number;
  readonly ppSize?: number;
  readonly stateSpace?: StateSpaceGeometry;
  /** By cache name: pages within the rows of a region that packs several layers. */
  readonly packedMembers?: Readonly<Record<string, PackedMember>>;
  /** Tokens in a logical block of each group, where they differ. Default: kernel block × kernel blocks in a logical one. */
  readonly groupBlockTokens?: readonly number[];
}

/** What the two engines must agree on; the compatibility hash covers it. */
export interface ModelGeometry {
  /** KV heads of the whole model; not looked at for MLA. */
  readonly numKvHeads: number;
  /** Kind of each KV cache group, in the order of the block ids of a request. */
  readonly groups: readonly KvCacheKind[];
  /** KV heads of each group, where groups differ in them. Default: `numKvHeads`. */
  readonly groupKvHeads?: readonly number[];
}
