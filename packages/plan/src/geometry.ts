import type { KvCacheKind, KvCacheLayout, MemoryType } from "@kv/interface";

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
}

/** What the two engines must agree on; the compatibility hash covers it. */
export interface ModelGeometry {
  /** KV heads of the whole model; not looked at for MLA. */
  readonly numKvHeads: number;
  /** Kind of each KV cache group, in the order of the block ids of a request. */
  readonly groups: readonly KvCacheKind[];
}
