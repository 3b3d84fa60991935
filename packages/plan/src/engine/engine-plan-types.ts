import type { DescriptorTable, KvCacheKind, MemoryType } from "@kv/interface";
import type { TpMapping } from "@kv/topology";
import type { RankGeometry } from "../geometry/rank-geometry.js";

/**
 * How bytes come to lie right. `copy`: each lands where it belongs. `permute`: the remote's smaller blocks land one after another within
 * the local block, and the receive pass puts heads and tokens in order. `direct`: block sizes or orders differ and a block is cut so
 * finely that each piece lands where it belongs, with no pass.
 */
export type TransferForm = "copy" | "permute" | "direct";

/**
 * Work that only the engine can do after a receive. `attention-order`: the attention backends differ in name, so the inside of a head
 * may be ordered differently. `hnd-to-nhd`: the remote is head-major, the local cache token-major.
 */
export type ReceiveConversion = "attention-order" | "hnd-to-nhd";

/** How the receive pass finds its way within a local block. `opaque`: not known here, so no byte of a block may be moved or zeroed. */
export type BlockOrder = "head-major" | "token-major" | "opaque";

/**
 * Rows of descriptors that all have one shape: commonly a region; the pieces of a state, and the heads of a region in the direct form, are
 * segments of their own. Position in `EngineTransferPlan.segments` is the order in the tables: attention first, then state.
 */
export interface SegmentPlan {
  /** Index into the regions of the local geometry, and of `remote`. */
  readonly region: number;
  readonly remoteRegion: number;
  /** Names the piece among those of its region, such as "conv 1", "state", "head 3"; empty for a whole region. */
  readonly piece: string;
  /** Blocks are counted in kernel blocks, or in logical ones: a state is never divided. */
  readonly unit: "kernel-block" | "logical-block";
  /** Pieces of one local block, and of one remote block, that have descriptors of their own; both stand for the same tokens. */
  readonly localParts: number;
  readonly remoteParts: number;
  /** Index into the lists of every source: segments of unlike memory types are in lists of their own. */
  readonly list: number;
  /** Bytes of one descriptor. */
  readonly lengthBytes: number;
}

/** Two descriptor tables that transfers pair by index: all of it in one type of memory on either side. */
export interface TransferList {
  readonly localMemoryType: MemoryType;
  readonly remoteMemoryType: MemoryType;
  /** As `SourcePlan.localListKey`. */
  readonly localListKey: string;
  /** Made at first use. */
  readonly localTable: DescriptorTable;
  readonly remoteTable: DescriptorTable;
}

/** What is the same of a group for all requests. */
export interface GroupPlan {
  readonly kind: KvCacheKind;
  /** What a list of its blocks stands for; see `CacheKind.extent`. */
  readonly extent: GroupExtent;
  readonly unit: "kernel-block" | "logical-block";
  /** Tokens in a logical block of this group; the groups of one model may differ. */
  readonly localBlockTokens: number;
  readonly remoteBlockTokens: number;
  /** Tokens that a descriptor stands for: both sides' blocks are whole multiples of it. */
  readonly partTokens: number;
  readonly localParts: number;
  readonly remoteParts: number;
  /** Local rows per logical block, and the same of the remote: kernel blocks, or 1 for a state. */
  readonly localPerLogical: number;
  readonly remotePerLogical: number;
  /** Segments that hold it. */
  readonly segments: readonly number[];
  /** KV heads of a local kernel block in the regions that it shares with a group of more heads; default: `headsOfRegion`. */
  readonly sharedHeads?: number;
}

/**
 * `sequence`: the whole of it, from its first token. `window`: its end, from somewhere on. `state`: the last of the blocks is the state
 * after the last token, none other is moved. `whole`: blocks without tokens, moved one by one.
 */
export type GroupExtent = "sequence" | "window" | "state" | "whole";

/** One remote rank that is read (or written), and the descriptor tables of its transfers. */
export interface SourcePlan {
  readonly remoteRank: number;
  /** Pipeline stage of the rank. */
  readonly remotePpRank: number;
  /** Groups that are read from this rank. */
  readonly groups: readonly number[];
  /** Segments that this rank holds: all, but for a stage of a pipeline. Ascending. */
  readonly segments: readonly number[];
  /** One per pair of memory types; `localListKey` and the tables below are those of the first. */
  readonly lists: readonly TransferList[];
  /** As the plan's `remoteIndexing`, for this rank: another stage of a pipeline has other segments. */
  readonly remoteIndexing: readonly RegionIndexing[];
  /**
   * Names the content of `localTable` among all plans of one local geometry: prepare one list per key, and share it. Most plans
   * have one key for all of their sources.
   */
  readonly localListKey: string;
  /** Made at first use. Rows do not grow with the number of blocks. */
  readonly localTable: DescriptorTable;
  /** Made at first use. */
  readonly remoteTable: DescriptorTable;
}

/** Where descriptors of a segment begin in a table, and how block ids step through them. */
export interface RegionIndexing {
  readonly offset: number;
  /** Descriptors of the segment. */
  readonly count: number;
  /** Index step from one block to the next, and from one part of a block to the next. */
  readonly blockStep: number;
  readonly partStep: number;
}

/** Everything about a pair of engines that does not depend on a request. Built once, after the handshake. */
export interface EngineTransferPlan {
  readonly mapping: TpMapping;
  readonly form: TransferForm;
  /** Why this form, for people: what it costs beside the other, or what rules the other out. */
  readonly formReason: string;
  /**
   * Parts of a local kernel block that have descriptors of their own: for the forms `copy` and `permute`, remote blocks in a local one. A
   * group whose blocks hold other tokens than the engine's may have others: `groupPlans`.
   */
  readonly blockSizeRatio: number;
  /** The same of a remote kernel block: 1 but where the remote's blocks are not smaller. */
  readonly remoteParts: number;
  readonly groups: readonly KvCacheKind[];
  readonly local: RankGeometry;
  /** Any one of the remote ranks: what `planRequest` needs of the remote is equal on all of them. */
  readonly remote: RankGeometry;
  /** In the order of `mapping.allSourceRanks`. */
  readonly sources: readonly SourcePlan[];
  /** Notifications that each remote rank awaits: the `n` of `"{request_id}:{n}"`. */
  readonly localConsumers: number;
  /** Remote ranks that get a notification and no read. */
  readonly notifyOnlyRanks: readonly number[];
  readonly conversions: readonly ReceiveConversion[];
  /** KV heads in a local block. */
  readonly localHeads: number;
  readonly blockOrder: BlockOrder;
  /** What becomes of local tokens that no transfer covered: the receive pass zeroes them, or the engine must mask them. */
  readonly uncovered: "zeroed" | "masked";
  /** Where segments are in the tables. Without state and in the forms `copy` and `permute`, segments are regions. */
  readonly segments: readonly SegmentPlan[];
  readonly groupPlans: readonly GroupPlan[];
  readonly localIndexing: readonly RegionIndexing[];
  readonly remoteIndexing: readonly RegionIndexing[];
  /** Region indices that hold each group's blocks. */
  readonly regionsOfGroup: readonly (readonly number[])[];
  /** KV heads in a local block of each region that is not like `localHeads`: a draft under an MLA target, layers with fewer heads. */
  readonly headsOfRegion: readonly number[];
  /** Pipeline stages of the remote engine, ascending. */
  readonly stages: readonly number[];
}
