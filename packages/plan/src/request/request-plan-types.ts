import type { BlockIds, DescriptorPairs, DescriptorRuns } from "@kv/interface";

/** The blocks of one request: logical block ids, per KV cache group. */
export interface RequestBlocks {
  /**
   * Local blocks to fill, without those of a local prefix hit. Empty lists mean a full hit, which
   * is only notified.
   */
  readonly localBlockIds: BlockIds;
  /** The remote's blocks of the whole request, its prefix included. */
  readonly remoteBlockIds: BlockIds;
  /**
   * Tokens that the remote's blocks hold (vLLM: `remote_num_tokens`). Local tokens beyond it are
   * uncovered.
   */
  readonly numTokens?: number | undefined;
  /**
   * Logical local blocks per group that a prefix hit supplies, before the first of `localBlockIds`.
   * Without it the two lists are aligned at their ends, as vLLM does. A request whose alignment
   * would be a guess is refused.
   */
  readonly localComputedBlocks?: readonly number[] | undefined;
}

/** One transfer: pairs of descriptor ids in the two tables of a source's list. */
export interface RequestRead {
  /** Tensor-parallel rank that is read. */
  readonly remoteRank: number;
  /** Pipeline stage of that rank. */
  readonly remotePpRank: number;
  /** Index into `EngineTransferPlan.sources`. */
  readonly sourceIndex: number;
  /** Index into the source's `lists`. */
  readonly listIndex: number;
  /** Rows `[localId, remoteId, count]`: `count` descriptors that are consecutive in both tables. */
  readonly runs: Int32Array;
  /**
   * The local ids of all runs. Written at first use; reads of one request may share the array, so
   * do not change it.
   */
  readonly localIds: Int32Array;
  /** The remote ids of all runs, pairwise with `localIds`. Shared in the same way. */
  readonly remoteIds: Int32Array;
  /** The shorter of the two spellings, for a `TransferRequest`. */
  readonly descriptors: DescriptorPairs | DescriptorRuns;
  /** `localIds.length`, known without writing the ids. */
  readonly descriptorCount: number;
  /** Bytes that the read moves. */
  readonly lengthBytes: number;
}

/** One rank of a remote engine. */
export interface RemoteRankId {
  /** Tensor-parallel rank. */
  readonly tpRank: number;
  /** Pipeline stage. */
  readonly ppRank: number;
}

/** Local kernel blocks of one group that the receive pass changes. */
export interface ReceivePassGroup {
  /** Index of the KV cache group. */
  readonly group: number;
  /** Blocks whose heads and tokens are put in order. */
  readonly permuteBlockIds: Int32Array;
  /** The block in which the remote's window begins: tokens before `untilToken` are zeroed. */
  readonly leadingBlock?: { readonly blockId: number; readonly untilToken: number } | undefined;
  /** The block that the transfers cover in part: tokens from `fromToken` on are zeroed. */
  readonly partialBlock?: { readonly blockId: number; readonly fromToken: number } | undefined;
  /** Blocks that no transfer covers; zeroed whole. */
  readonly zeroBlockIds: Int32Array;
}

/**
 * The changes to the local cache that `applyReceivePass` makes when all reads of a request have
 * landed, before the engine uses the blocks.
 */
export interface ReceivePass {
  /** Groups with blocks to change. */
  readonly groups: readonly ReceivePassGroup[];
}

/** The transfers, notifications and receive pass of one request. */
export interface RequestPlan {
  /**
   * Transfers with at least one descriptor. A transfer carries the notification of its rank when it
   * is the only one for that rank. Of several transfers (one for each type of memory) none does,
   * and the rank is notified when all have landed.
   */
  readonly reads: readonly RequestRead[];
  /** Tensor-parallel ranks of `notify`. */
  readonly notifyRanks: readonly number[];
  /**
   * Remote ranks that are notified and not read: replicas, and source ranks without blocks of this
   * request.
   */
  readonly notify: readonly RemoteRankId[];
  /** Undefined when no block needs a change. */
  readonly receivePass: ReceivePass | undefined;
  /** Descriptors of all reads. */
  readonly descriptorCount: number;
  /** Rows in the `runs` of all reads. */
  readonly runCount: number;
  /** Bytes of all reads. */
  readonly lengthBytes: number;
}
