import { type KvCacheKind, KvError } from "@kv/interface";
import {
  dcpConsumerCount,
  type EnginePair,
  handshakeTargetRanks,
  rankSequence,
  requireInteger,
  requireRank,
  tpRatio,
} from "./remote-ranks.js";

/** Input of `computeTpMapping`. */
export interface TpMappingOptions extends EnginePair {
  /** KV heads of the whole model. Ignored for MLA. */
  readonly numKvHeads: number;
  readonly isMla: boolean;
  readonly groups: readonly KvCacheKind[];
  /**
   * Heads of a cache that is split although the target is MLA (a GQA draft); the mapping is then
   * for it.
   */
  readonly headShardedKvHeads?: number | undefined;
}

/** The remote ranks that a local rank reads and notifies, and the places of their heads. Frozen. */
export interface TpMapping {
  /**
   * By group: the ranks to read. A rank's position is the index of the local piece that it fills.
   */
  readonly sourceRanksPerGroup: readonly (readonly number[])[];
  readonly attentionRanks: readonly number[];
  /** Union of the above, ascending. */
  readonly allSourceRanks: readonly number[];
  /**
   * By source rank: the head slot that it fills in the local block. Ranks with the same head share
   * one.
   */
  readonly rankToAttentionSlot: Readonly<Record<number, number>>;
  /** Where the local heads begin in a remote block, in local shares. */
  readonly rankOffsetFactor: number;
  /** The `n` of `"{request_id}:{n}"`. */
  readonly localConsumers: number;
  /** `allSourceRanks` and `notifyOnlyRanks`. */
  readonly handshakeRanks: readonly number[];
  /** Ranks with replicas, which await a notification only. */
  readonly notifyOnlyRanks: readonly number[];
}

/**
 * Returns the mapping of vLLM 0.33's `compute_tp_mapping`.
 * @throws `KV_TOPOLOGY_INVALID` with both values when TP sizes do not divide one another, a number
 * is out of range, or there is no group.
 */
export function computeTpMapping(options: TpMappingOptions): TpMapping {
  const { tpRank, tpSize, remoteTpSize, remoteDcpSize = 1, groups, headShardedKvHeads } = options;
  requireRank("tpRank", tpRank, "tpSize", tpSize);
  requireInteger("numKvHeads", options.numKvHeads, 1);
  if (headShardedKvHeads !== undefined) requireInteger("headShardedKvHeads", headShardedKvHeads, 1);
  if (groups.length === 0)
    throw new KvError(
      "KV_TOPOLOGY_INVALID",
      "a mapping needs at least one KV cache group, got none",
    );
  const ratio = tpRatio(tpSize, remoteTpSize);
  const isMla = options.isMla && headShardedKvHeads === undefined;
  const numKvHeads = headShardedKvHeads ?? (options.isMla ? 1 : options.numKvHeads);
  const localConsumers = dcpConsumerCount(options);
  const heads: RemoteHeads = { numKvHeads, remoteTpSize };

  const theirRank = Math.floor((tpRank * remoteTpSize) / tpSize);
  const handshakeRanks =
    ratio > 0 && remoteDcpSize === 1
      ? Object.freeze([theirRank])
      : Object.freeze(handshakeTargetRanks(options));
  let attentionRanks = handshakeRanks;
  if (remoteDcpSize === 1 || !isMla) {
    attentionRanks =
      ratio < 0 && !isMla
        ? firstRankOfEachHead(tpRank * -ratio, -ratio, heads)
        : Object.freeze([theirRank]);
  }
  // States are always split, even where heads are replicated.
  const stateRanks =
    ratio > 0 ? attentionRanks : Object.freeze(rankSequence(tpRank * -ratio, -ratio));
  const sourceRanksPerGroup: (readonly number[])[] = [];
  let allSourceRanks = attentionRanks;
  for (const kind of groups) {
    sourceRanksPerGroup.push(kind === "mamba" ? stateRanks : attentionRanks);
    if (kind === "mamba" && stateRanks !== attentionRanks)
      allSourceRanks = union(attentionRanks, stateRanks);
  }
  return Object.freeze({
    sourceRanksPerGroup: Object.freeze(sourceRanksPerGroup),
    attentionRanks,
    allSourceRanks,
    rankToAttentionSlot: attentionSlots(attentionRanks, allSourceRanks, heads),
    rankOffsetFactor: isMla ? 0 : headOffset(options, ratio, numKvHeads),
    localConsumers,
    handshakeRanks,
    notifyOnlyRanks: others(handshakeRanks, allSourceRanks),
  });
}

interface RemoteHeads {
  readonly numKvHeads: number;
  readonly remoteTpSize: number;
}

function headOf({ numKvHeads, remoteTpSize }: RemoteHeads, rank: number): number {
  return Math.floor((rank * numKvHeads) / remoteTpSize);
}

/** Ranks of other heads are read only for their state. */
function attentionSlots(
  attentionRanks: readonly number[],
  allSourceRanks: readonly number[],
  heads: RemoteHeads,
): Readonly<Record<number, number>> {
  const slots: Record<number, number> = {};
  const slotOfHead = new Map<number, number>();
  for (const [slot, rank] of attentionRanks.entries()) slotOfHead.set(headOf(heads, rank), slot);
  for (const rank of allSourceRanks) slots[rank] = slotOfHead.get(headOf(heads, rank)) ?? 0;
  return Object.freeze(slots);
}

function union(one: readonly number[], other: readonly number[]): readonly number[] {
  return Object.freeze([...new Set([...one, ...other])].sort((a, b) => a - b));
}

const NONE: readonly number[] = Object.freeze([]);

function others(ranks: readonly number[], without: readonly number[]): readonly number[] {
  if (ranks.length === without.length) return NONE;
  return Object.freeze(ranks.filter((rank) => !without.includes(rank)));
}

/** With fewer heads than ranks, the first rank of each head is read. */
function firstRankOfEachHead(start: number, count: number, heads: RemoteHeads): readonly number[] {
  const ranks = [start];
  for (let rank = start + 1; rank < start + count; rank++)
    if (headOf(heads, rank) !== headOf(heads, rank - 1)) ranks.push(rank);
  return Object.freeze(ranks);
}

function headOffset(
  { tpRank, tpSize, remoteTpSize }: EnginePair,
  ratio: number,
  numKvHeads: number,
): number {
  if (tpSize <= remoteTpSize) return 0;
  if (tpSize <= numKvHeads) return tpRank % ratio;
  const remoteRank = Math.floor((tpRank * remoteTpSize) / tpSize);
  return (
    Math.floor((tpRank * numKvHeads) / tpSize) -
    Math.floor((remoteRank * numKvHeads) / remoteTpSize)
  );
}
