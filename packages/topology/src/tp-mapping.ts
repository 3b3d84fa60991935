import { type KvCacheKind, KvError } from "@kv/interface";
import {
  dcpConsumerCount,
  type EnginePair,
  handshakeTargetRanks,
  targetRemoteRanks,
  tpRatio,
} from "./remote-ranks.js";
import { requireInteger, requireRank } from "./required-integers.js";

export interface TpMappingOptions extends EnginePair {
  /** KV heads of the whole model. Not looked at for MLA, which has one. */
  readonly numKvHeads: number;
  readonly isMla: boolean;
  /** Kind of each KV cache group. */
  readonly groups: readonly KvCacheKind[];
  /** Maps caches that are split by head although the target is MLA (a GQA draft): their number of heads. */
  readonly headShardedKvHeads?: number;
}

/** Which remote ranks a local rank reads from, and what of them. Made once per remote engine; frozen plain data. */
export interface TpMapping {
  /** Remote ranks read for each group; the position is the index of the local piece that the rank fills. */
  readonly sourceRanksPerGroup: readonly (readonly number[])[];
  /** Ranks read for heads and tokens, whether or not a group has any. */
  readonly attentionRanks: readonly number[];
  /** Union of the above, ascending. */
  readonly allSourceRanks: readonly number[];
  /** Head slot within the local block that each source rank fills; several source ranks of one head share a slot. */
  readonly rankToAttentionSlot: Readonly<Record<number, number>>;
  /** Where this rank's heads begin within the remote block, in units of the local share. */
  readonly rankOffsetFactor: number;
  /** Notifications that each remote rank awaits: the `n` of `"{request_id}:{n}"`. */
  readonly localConsumers: number;
  /** Remote ranks to shake hands with: source ranks, and those below. */
  readonly handshakeRanks: readonly number[];
  /** Remote ranks that hold a copy which nobody reads, and wait to be told all the same. */
  readonly notifyOnlyRanks: readonly number[];
}

/**
 * The mapping of vLLM 0.33's `compute_tp_mapping`, as one pure function. Errors: `KV_TOPOLOGY_INVALID` with both values when sizes do
 * not divide or a rank is out of range.
 */
export function computeTpMapping(options: TpMappingOptions): TpMapping {
  const { tpRank, tpSize, remoteTpSize, remoteDcpSize = 1, groups, headShardedKvHeads } = options;
  requireRank("tpRank", tpRank, "tpSize", tpSize);
  requireInteger("numKvHeads", options.numKvHeads, 1);
  if (headShardedKvHeads !== undefined) requireInteger("headShardedKvHeads", headShardedKvHeads, 1);
  if (groups.length === 0)
    throw new KvError("KV_TOPOLOGY_INVALID", "a mapping needs at least one KV cache group, got none");
  const ratio = tpRatio(tpSize, remoteTpSize);
  const isMla = options.isMla && headShardedKvHeads === undefined;
  const numKvHeads = headShardedKvHeads ?? (options.isMla ? 1 : options.numKvHeads);
  const heads: RemoteHeads = { numKvHeads, remoteTpSize };

  const handshakeRanks = Object.freeze(handshakeTargetRanks(options));
  const faced = Object.freeze(targetRemoteRanks(options));
  const attentionRanks =
    isMla && remoteDcpSize > 1
      ? handshakeRanks
      : Object.freeze(isMla ? faced.slice(0, 1) : firstRankOfEachHead(faced, heads));
  // State-space caches are always split, also where attention heads are replicated.
  const stateRanks = tpSize < remoteTpSize ? faced : attentionRanks;
  const readsState = groups.includes("mamba");
  const allSourceRanks = readsState ? union(attentionRanks, stateRanks) : attentionRanks;
  return Object.freeze({
    sourceRanksPerGroup: Object.freeze(
      groups.map((kind) => (kind === "mamba" ? stateRanks : attentionRanks)),
    ),
    attentionRanks,
    allSourceRanks,
    rankToAttentionSlot: attentionSlots(attentionRanks, allSourceRanks, heads),
    rankOffsetFactor: isMla ? 0 : headOffset(options, ratio, numKvHeads),
    localConsumers: dcpConsumerCount(options),
    handshakeRanks,
    notifyOnlyRanks: Object.freeze(handshakeRanks.filter((rank) => !allSourceRanks.includes(rank))),
  });
}

interface RemoteHeads {
  readonly numKvHeads: number;
  readonly remoteTpSize: number;
}

/** First KV head of a remote rank. */
function headOf({ numKvHeads, remoteTpSize }: RemoteHeads, rank: number): number {
  return Math.floor((rank * numKvHeads) / remoteTpSize);
}

/** The slot of the attention rank that holds the same head; ranks of other heads are at 0, and read for their state only. */
function attentionSlots(
  attentionRanks: readonly number[],
  allSourceRanks: readonly number[],
  heads: RemoteHeads,
): Readonly<Record<number, number>> {
  const slotOfHead = new Map<number, number>();
  for (const [slot, rank] of attentionRanks.entries()) slotOfHead.set(headOf(heads, rank), slot);
  const slots: Record<number, number> = {};
  for (const rank of allSourceRanks) slots[rank] = slotOfHead.get(headOf(heads, rank)) ?? 0;
  return Object.freeze(slots);
}

function union(one: readonly number[], other: readonly number[]): readonly number[] {
  return Object.freeze([...new Set([...one, ...other])].sort((a, b) => a - b));
}

/** Several remote ranks hold the same KV head when there are fewer heads than ranks: the first one of each is read. */
function firstRankOfEachHead(ranks: readonly number[], heads: RemoteHeads): number[] {
  return ranks.filter((rank, index) => headOf(heads, rank) !== headOf(heads, ranks[index - 1] ?? -1));
}

function headOffset({ tpRank, tpSize, remoteTpSize }: EnginePair, ratio: number, numKvHeads: number): number {
  if (tpSize <= numKvHeads) return tpRank % Math.max(1, ratio);
  const remoteRank = Math.floor((tpRank * remoteTpSize) / tpSize);
  return Math.floor((tpRank * numKvHeads) / tpSize) - Math.floor((remoteRank * numKvHeads) / remoteTpSize);
}
