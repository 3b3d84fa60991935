import type { BlockIds } from "@kv/interface";

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
  /** Position in `plan.sources`. */
  readonly sourceIndex: number;
  readonly localIds: Int32Array;
  readonly remoteIds: Int32Array;
  readonly lengthBytes: number;
}

/** Local kernel blocks of one group that the receive pass touches. */
export interface ReceivePassGroup {
  readonly group: number;
  /** Blocks whose heads and tokens are put in order. */
  readonly permuteBlockIds: Int32Array;
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
  /** Transfers with at least one descriptor; each carries the notification of its rank. */
  readonly reads: readonly RequestRead[];
  /** Remote ranks that are only notified: unread copies, and source ranks with nothing to read from. */
  readonly notifyRanks: readonly number[];
  /** Undefined when there is nothing to do. */
  readonly receivePass: ReceivePass | undefined;
  /** Over all reads. */
  readonly descriptorCount: number;
  /** What remains of `descriptorCount` when a transport merges neighbours that are consecutive on both sides. */
  readonly runCount: number;
  /** Over all reads. */
  readonly lengthBytes: number;
}
