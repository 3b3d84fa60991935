import { KvError } from "@kv/interface";
import { requireInteger, requireRank } from "./required-integers.js";

/** Consecutive KV heads of the model. */
export interface KvHeadRange {
  readonly firstHead: number;
  readonly numHeads: number;
}

/**
 * The KV heads that a rank holds: a share of them, or one head that other ranks hold as well when there are more ranks than heads.
 * Errors: `KV_TOPOLOGY_INVALID` when ranks and heads do not divide, since then no engine could have split the heads.
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

/** Who holds copies. */
export interface KvReplication {
  /** More remote ranks than KV heads: a head is on several of them. */
  readonly remoteReplicatesHeads: boolean;
  /** As above, or MLA, whose cache is the same on every rank. */
  readonly remoteReplicatesCache: boolean;
  readonly localReplicatesCache: boolean;
  /** Heads in a local rank's cache. */
  readonly localHeads: number;
}

export function kvReplication(options: {
  readonly tpSize: number;
  readonly remoteTpSize: number;
  /** KV heads of the model; not looked at for MLA. */
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
