import type { DescriptorTable, KvCacheKind } from "@kv/interface";
import type { TpMapping } from "@kv/topology";
import type { RankGeometry } from "./geometry.js";

/**
 * How bytes come to lie right. `copy`: each lands where it belongs. `permute`: the remote's smaller blocks land one after another within
 * the local block, and the receive pass puts heads and tokens in order.
 */
export type TransferForm = "copy" | "permute";

/**
 * Work that only the engine can do after a receive. `attention-order`: the attention backends differ in name, so the inside of a head
 * may be ordered differently. `hnd-to-nhd`: the remote is head-major, the local cache token-major.
 */
export type ReceiveConversion = "attention-order" | "hnd-to-nhd";

/** How the receive pass finds its way within a local block. `opaque`: not known here, so no byte of a block may be moved or zeroed. */
export type BlockOrder = "head-major" | "token-major" | "opaque";

/** One remote rank that is read, and the two descriptor tables of its transfers. */
export interface SourcePlan {
  readonly remoteRank: number;
  /** Groups that are read from this rank. */
  readonly groups: readonly number[];
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

/** Where descriptors of a region begin in a table, and how block ids step through them. */
export interface RegionIndexing {
  readonly offset: number;
  /** Descriptors of the region. */
  readonly count: number;
  /** Index step from one local block to the next, and from one part of a block to the next. */
  readonly blockStep: number;
  readonly partStep: number;
}

/** Everything about a pair of engines that does not depend on a request. Built once, after the handshake. */
export interface EngineTransferPlan {
  readonly mapping: TpMapping;
  readonly form: TransferForm;
  /** Remote kernel blocks in a local kernel block. */
  readonly blockSizeRatio: number;
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
  /** What becomes of local tokens that no transfer covered: zeroed by the receive pass, or the engine must mask them. */
  readonly uncovered: "zeroed" | "masked";
  readonly localIndexing: readonly RegionIndexing[];
  readonly remoteIndexing: readonly RegionIndexing[];
  /** Region indices that hold each group's blocks. */
  readonly regionsOfGroup: readonly (readonly number[])[];
}
