import type { DescriptorTable, KvCacheKind, MemoryType } from "@kv/interface";
import type { TpMapping } from "@kv/topology";
import type { RankGeometry } from "../geometry/rank-geometry.js";

/**
 * How bytes get into the order of the local cache. `copy`: every descriptor's bytes land in their
 * final place. `permute`: the remote's smaller blocks land one after another within the local
 * block, and the receive pass puts heads and tokens in order. `direct`: block sizes or orders
 * differ, and blocks are cut into pieces that land in their final place, without a pass.
 */
export type TransferForm = "copy" | "permute" | "direct";

/**
 * A conversion that only the engine can do, after a receive. `attention-order`: the attention
 * backends have different names, so the order inside a head may differ. `hnd-to-nhd`: the remote
 * cache is head-major and the local one token-major (vLLM: `enable_permute_local_kv`).
 */
export type ReceiveConversion = "attention-order" | "hnd-to-nhd";

/**
 * Order of heads and tokens within a local block. `opaque`: the order is unknown here, so no part
 * of a block is moved or zeroed.
 */
export type BlockOrder = "head-major" | "token-major" | "opaque";

/**
 * Rows of descriptors of one shape: commonly a region. The pieces of a state, and the heads of a
 * region in the direct form, are segments of their own. The position in
 * `EngineTransferPlan.segments` is the order in the tables: attention first, then state.
 */
export interface SegmentPlan {
  /** Index into the regions of the local rank. */
  readonly region: number;
  /** Index into the regions of `EngineTransferPlan.remote`. */
  readonly remoteRegion: number;
  /**
   * Name of the piece among those of its region, such as "conv 1", "state" or "head 3"; empty for a
   * whole region.
   */
  readonly piece: string;
  /** Unit in which blocks are counted. A state is never divided, so it counts logical blocks. */
  readonly unit: "kernel-block" | "logical-block";
  /** Descriptors of one local block. */
  readonly localParts: number;
  /** Descriptors of one remote block. A local and a remote part stand for equally many tokens. */
  readonly remoteParts: number;
  /** Index into the lists of every source. Each pair of memory types has a list. */
  readonly list: number;
  /** Bytes of one descriptor. */
  readonly lengthBytes: number;
}

/**
 * Two descriptor tables whose descriptors a transfer pairs by index. Each table lies in one type of
 * memory.
 */
export interface TransferList {
  /** Memory of the local table. */
  readonly localMemoryType: MemoryType;
  /** Memory of the remote table. */
  readonly remoteMemoryType: MemoryType;
  /**
   * Identifies the content of `localTable` among all plans of one local rank: prepare one list per
   * key, and share it.
   */
  readonly localListKey: string;
  /**
   * Descriptors of the local rank. Built at first use; the number of rows does not depend on the
   * number of blocks.
   */
  readonly localTable: DescriptorTable;
  /** Descriptors of the remote rank. Built at first use. */
  readonly remoteTable: DescriptorTable;
}

/** The part of a group's plan that is the same for all requests. */
export interface GroupPlan {
  /** Kind of the group. */
  readonly kind: KvCacheKind;
  /** The part of a sequence that a list of the group's blocks holds. */
  readonly extent: GroupExtent;
  /** Unit in which descriptors count the group's blocks. */
  readonly unit: "kernel-block" | "logical-block";
  /** Tokens in a logical local block. The groups of one model may differ. */
  readonly localBlockTokens: number;
  /** Tokens in a logical remote block. */
  readonly remoteBlockTokens: number;
  /** Tokens of one descriptor. Both sides' blocks hold whole multiples of it. */
  readonly partTokens: number;
  /** Descriptors of a local block, in `unit`s. */
  readonly localParts: number;
  /** Descriptors of a remote block, in `unit`s. */
  readonly remoteParts: number;
  /** `unit`s in a logical local block: kernel blocks, or 1 for a state. */
  readonly localPerLogical: number;
  /** `unit`s in a logical remote block. */
  readonly remotePerLogical: number;
  /** Indices of the segments that hold the group's blocks. */
  readonly segments: readonly number[];
  /**
   * KV heads in a local kernel block, where the group shares regions with a group of more heads.
   * @default headsOfRegion
   */
  readonly sharedHeads?: number | undefined;
}

/**
 * The part of a sequence that a list of blocks holds. `sequence`: all of it, from the first token.
 * `window`: its end. `state`: the last block is the state after the last token, and no other block
 * is moved. `whole`: blocks without tokens, which are moved one by one.
 */
export type GroupExtent = "sequence" | "window" | "state" | "whole";

/** One remote rank that is read, with the descriptor tables of its transfers. */
export interface SourcePlan {
  /** Tensor-parallel rank. */
  readonly remoteRank: number;
  /** Pipeline stage of the rank. */
  readonly remotePpRank: number;
  /** Groups that are read from this rank, ascending. */
  readonly groups: readonly number[];
  /**
   * Indices of the segments that are read from this rank, ascending. A pipeline stage holds some of
   * them.
   */
  readonly segments: readonly number[];
  /** One list for each pair of memory types. */
  readonly lists: readonly TransferList[];
  /** By segment: its place in the remote tables of this rank. */
  readonly remoteIndexing: readonly RegionIndexing[];
  /** `localListKey` of the first list. Most plans have one key for all sources. */
  readonly localListKey: string;
  /** `localTable` of the first list. Built at first use. */
  readonly localTable: DescriptorTable;
  /** `remoteTable` of the first list. Built at first use. */
  readonly remoteTable: DescriptorTable;
}

/**
 * The place of a segment in a table: part `p` of block `b` is descriptor
 * `offset + b * blockStep + p * partStep`.
 */
export interface RegionIndexing {
  /** Id of the segment's first descriptor. */
  readonly offset: number;
  /** Descriptors of the segment; 0 where the rank does not hold it. */
  readonly count: number;
  /** Ids from one block to the next. */
  readonly blockStep: number;
  /** Ids from one part of a block to the next. */
  readonly partStep: number;
}

/**
 * The plan of one local rank against one remote engine. Built once, after the handshake; frozen. It
 * does not depend on a request.
 */
export interface EngineTransferPlan {
  /** The remote ranks that the local rank reads and notifies. */
  readonly mapping: TpMapping;
  /** How bytes get into the order of the local cache. */
  readonly form: TransferForm;
  /**
   * The reason for `form`, for people: its cost beside the other form, or the condition that
   * excludes the other form.
   */
  readonly formReason: string;
  /**
   * Descriptors of a local kernel block. For the forms `copy` and `permute`: remote blocks in a
   * local one. Groups whose blocks hold other numbers of tokens may have others: `groupPlans`.
   */
  readonly blockSizeRatio: number;
  /**
   * Descriptors of a remote kernel block: 1, unless the remote's blocks are not smaller parts of
   * the local ones.
   */
  readonly remoteParts: number;
  /** Kind of each KV cache group. */
  readonly groups: readonly KvCacheKind[];
  /** The local rank. */
  readonly local: RankGeometry;
  /** One of the remote ranks. All of them are equal in everything that `planRequest` uses. */
  readonly remote: RankGeometry;
  /** Remote ranks that are read, in the order of `mapping.allSourceRanks`, stage by stage. */
  readonly sources: readonly SourcePlan[];
  /** Notifications that each remote rank awaits: the `n` of vLLM's `"{request_id}:{n}"`. */
  readonly localConsumers: number;
  /** Remote ranks that are notified and not read. */
  readonly notifyOnlyRanks: readonly number[];
  /** Conversions that the engine must do after a receive. */
  readonly conversions: readonly ReceiveConversion[];
  /** KV heads in a local block. */
  readonly localHeads: number;
  /** Order of heads and tokens within a local block, for the receive pass. */
  readonly blockOrder: BlockOrder;
  /**
   * What happens to local tokens that no transfer covers: the receive pass zeroes them, or the
   * engine must mask them.
   */
  readonly uncovered: "zeroed" | "masked";
  /**
   * The segments of the tables. Without states, and in the forms `copy` and `permute`, each segment
   * is a region.
   */
  readonly segments: readonly SegmentPlan[];
  /** By group. */
  readonly groupPlans: readonly GroupPlan[];
  /** By segment: its place in the local tables, which is the same for all sources. */
  readonly localIndexing: readonly RegionIndexing[];
  /**
   * By segment: its place in the remote tables of the first source. Other stages have other
   * segments: `SourcePlan.remoteIndexing`.
   */
  readonly remoteIndexing: readonly RegionIndexing[];
  /** By group: indices of the local regions that hold its blocks. */
  readonly regionsOfGroup: readonly (readonly number[])[];
  /**
   * By region: KV heads in a local block. A draft under an MLA target, or layers with fewer heads,
   * differ from `localHeads`.
   */
  readonly headsOfRegion: readonly number[];
  /** Pipeline stages of the remote engine, ascending. */
  readonly stages: readonly number[];
}
