import { KvError } from "@kv/interface";
import { requireInteger, requireRank } from "./remote-ranks.js";

/** Consecutive KV heads of the model. */
export interface KvHeadRange {
  readonly firstHead: number;
  readonly numHeads: number;
}

/**
 * Returns a rank's share of the KV heads, or the one that it shares when ranks outnumber heads.
 *
 * @throws `KV_TOPOLOGY_INVALID` when neither of TP size and heads divides the other, or a number is
 * out of range.
 */
export function kvHeadsOfRank(tpRank: number, tpSize: number, numKvHeads: number): KvHeadRange {
  requireRank("tpRank", tpRank, "tpSize", tpSize);
  requireInteger("numKvHeads", numKvHeads, 1);
  if (tpSize % numKvHeads !== 0 && numKvHeads % tpSize !== 0) {
    throw new KvError(
      "KV_TOPOLOGY_INVALID",
      `${numKvHeads} KV heads cannot be split over TP size ${tpSize}: neither divides the other`,
      { details: { numKvHeads, tpSize } },
    );
  }
  return Object.freeze({
    firstHead: Math.floor((tpRank * numKvHeads) / tpSize),
    numHeads: Math.max(1, numKvHeads / tpSize),
  });
}

/** Whether ranks hold replicas of KV heads (vLLM 0.33: `TransferTopology`). */
export interface KvReplication {
  /** It has more ranks than KV heads. */
  readonly remoteReplicatesHeads: boolean;
  /** `remoteReplicatesHeads`, or MLA. */
  readonly remoteReplicatesCache: boolean;
  readonly localReplicatesCache: boolean;
  readonly localHeads: number;
}

/**
 * Returns which engines hold replicas.
 * @throws `KV_TOPOLOGY_INVALID` for a number below 1.
 */
export function kvReplication(options: {
  readonly tpSize: number;
  readonly remoteTpSize: number;
  readonly numKvHeads: number;
  readonly isMla: boolean;
}): KvReplication {
  const { tpSize, remoteTpSize, isMla } = options;
  requireInteger("tpSize", tpSize, 1);
  requireInteger("remoteTpSize", remoteTpSize, 1);
  requireInteger("numKvHeads", options.numKvHeads, 1);
  const numKvHeads = isMla ? 1 : options.numKvHeads;
  const remoteReplicatesHeads = remoteTpSize > numKvHeads;
  return Object.freeze({
    remoteReplicatesHeads,
    remoteReplicatesCache: isMla || remoteReplicatesHeads,
    localReplicatesCache: isMla || tpSize > numKvHeads,
    localHeads: Math.max(1, Math.floor(numKvHeads / tpSize)),
  });
}
