import type { BlockIds, DescriptorPairs, DescriptorRuns } from "@kv/interface";

/** Blocks of one request, by logical ids per KV cache group. */
export interface RequestBlocks {
  /** Local blocks to fill: those of a local prefix hit are left out. No blocks at all: a full hit, which is only notified. */
  readonly localBlockIds: BlockIds;
  /** The remote's blocks of the whole request, its prefix included. */
  readonly remoteBlockIds: BlockIds;
  /** Tokens that the remote's blocks hold (`remote_num_tokens`). Local tokens beyond it are uncovered. */
  readonly numTokens?: number;
  /**
   * Logical local blocks per group that the prefix hit supplies, before the first of `localBlockIds`. Without it the two lists are aligned
   * at their ends, as vLLM does; where that would be a guess the request is refused.
   */
  readonly localComputedBlocks?: readonly number[];
}

/** One transfer: pairwise descriptor ids into the source's two lists. */
export interface RequestRead {
  readonly remoteRank: number;
  readonly remotePpRank: number;
  /** Position in `plan.sources`. */
  readonly sourceIndex: number;
  /** Position in the source's `lists`. */
  readonly listIndex: number;
  /**
   * Rows `[localId, remoteId, count]`: `count` descriptors that follow one another in both lists. What is consecutive is one row,
   * however long.
   */
  readonly runs: Int32Array;
  /** The runs written out, at first use. Reads of one request may share them: do not change them. */
  readonly localIds: Int32Array;
  readonly remoteIds: Int32Array;
  /** The shorter spelling of the two, for a `TransferRequest`. */
  readonly descriptors: DescriptorPairs | DescriptorRuns;
  /** `localIds.length`, without writing them out. */
  readonly descriptorCount: number;
  readonly lengthBytes: number;
}

/** A rank of a remote engine: its tensor and pipeline position. */
export interface RemoteRankId {
  readonly tpRank: number;
  readonly ppRank: number;
}

/** Local kernel blocks of one group that the receive pass touches. */
export interface ReceivePassGroup {
  readonly group: number;
  /** Blocks whose heads and tokens are put in order. */
  readonly permuteBlockIds: Int32Array;
  /** The block in which the remote's window begins: tokens before `untilToken` are zeroed. */
  readonly leadingBlock?: { readonly blockId: number; readonly untilToken: number };
  /** The block that is covered in part: tokens from here on are zeroed. */
  readonly partialBlock?: { readonly blockId: number; readonly fromToken: number };
  /** Blocks that no transfer covered; zeroed whole. */
  readonly zeroBlockIds: Int32Array;
}

/** What is to be done to the local cache when all reads of a request have landed, before the engine may look at it. */
export interface ReceivePass {
  readonly groups: readonly ReceivePassGroup[];
}

export interface RequestPlan {
  /**
   * Transfers with at least one descriptor; each carries the notification of its rank, where it is the only one of its rank: of several
   * (types of memory) none does, and the rank is told when all have landed.
   */
  readonly reads: readonly RequestRead[];
  /** Remote ranks that are only notified: unread copies, and source ranks with nothing to read from. */
  readonly notifyRanks: readonly number[];
  /** The same with their pipeline stages. */
  readonly notify: readonly RemoteRankId[];
  /** Undefined when there is nothing to do. */
  readonly receivePass: ReceivePass | undefined;
  /** Over all reads. */
  readonly descriptorCount: number;
  /** Rows in the `runs` of all reads: stretches of ids. How many descriptors remain of them in memory, `mergedDescriptorCount` says. */
  readonly runCount: number;
  /** Over all reads. */
  readonly lengthBytes: number;
}
