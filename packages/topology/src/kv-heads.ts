import { KvError } from "@kv/interface";
import { requireInteger, requireRank } from "./required-integers.js";

/** Consecutive KV heads of the model. */
export interface KvHeadRange {
  /** Index of the first head. */
  readonly firstHead: number;
  /** Number of heads. */
  readonly numHeads: number;
}

/**
 * The KV heads that a rank holds: a share of them, or one head that other ranks hold as well when
 * there are more ranks than heads.
 *
 * @throws `KV_TOPOLOGY_INVALID` when neither of TP size and heads divides the other, or when a
 * number is out of range.
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

/**
 * Whether ranks of the two engines hold replicas of KV heads (vLLM 0.33: the properties of
 * `TransferTopology`).
 */
export interface KvReplication {
  /** The remote engine has more ranks than KV heads, so several ranks hold one head. */
  readonly remoteReplicatesHeads: boolean;
  /** `remoteReplicatesHeads`, or MLA, whose cache is the same on every rank. */
  readonly remoteReplicatesCache: boolean;
  /** The same for the local engine. */
  readonly localReplicatesCache: boolean;
  /** Heads in a local rank's cache. */
  readonly localHeads: number;
}

/**
 * Whether ranks hold replicas, for two TP sizes and a number of KV heads.
 * @throws `KV_TOPOLOGY_INVALID` for a number below 1.
 */
export function kvReplication(options: {
  /** Tensor-parallel size of the local engine. */
  readonly tpSize: number;
  /** Tensor-parallel size of the remote engine. */
  readonly remoteTpSize: number;
  /** KV heads of the model. Ignored for MLA. */
  readonly numKvHeads: number;
  /** The model has multi-head latent attention. */
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
