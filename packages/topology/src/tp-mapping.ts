import { type KvCacheKind, KvError } from "@kv/interface";
import { oneRank, rankSequence } from "./rank-sequence.js";
import {
  dcpConsumerCount,
  type EnginePair,
  handshakeTargetRanks,
  tpRatio,
} from "./remote-ranks.js";
import { requireInteger, requireRank } from "./required-integers.js";

/** Input of `computeTpMapping`. */
export interface TpMappingOptions extends EnginePair {
  /** KV heads of the whole model. Ignored for MLA, which has one. */
  readonly numKvHeads: number;
  /** The model has multi-head latent attention. */
  readonly isMla: boolean;
  /** Kind of each KV cache group. */
  readonly groups: readonly KvCacheKind[];
  /**
   * KV heads of caches that are split by head although the target is MLA (a GQA draft). The mapping
   * is then that of these caches.
   */
  readonly headShardedKvHeads?: number | undefined;
}

/**
 * The remote ranks that a local rank reads and notifies, and the place of their heads. Built once
 * per remote engine; frozen plain data.
 */
export interface TpMapping {
  /**
   * By group: the remote ranks that are read. The position in the list is the index of the local
   * piece that the rank fills.
   */
  readonly sourceRanksPerGroup: readonly (readonly number[])[];
  /** Ranks that are read for heads and tokens. Present even where no group has any. */
  readonly attentionRanks: readonly number[];
  /** Union of the above, ascending. */
  readonly allSourceRanks: readonly number[];
  /**
   * By source rank: the head slot within the local block that it fills. Source ranks of one head
   * share a slot.
   */
  readonly rankToAttentionSlot: Readonly<Record<number, number>>;
  /** The begin of the local rank's heads within a remote block, in local shares. */
  readonly rankOffsetFactor: number;
  /** Notifications that each remote rank awaits: the `n` of `"{request_id}:{n}"`. */
  readonly localConsumers: number;
  /** Remote ranks to shake hands with: `allSourceRanks` and `notifyOnlyRanks`. */
  readonly handshakeRanks: readonly number[];
  /** Remote ranks that hold replicas which are not read. They await a notification too. */
  readonly notifyOnlyRanks: readonly number[];
}

/**
 * The mapping of vLLM 0.33's `compute_tp_mapping`, as a pure function.
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
      ? oneRank(theirRank)
      : Object.freeze(handshakeTargetRanks(options));
  let attentionRanks = handshakeRanks;
  if (remoteDcpSize === 1 || !isMla) {
    attentionRanks =
      ratio < 0 && !isMla
        ? firstRankOfEachHead(tpRank * -ratio, -ratio, heads)
        : oneRank(theirRank);
  }
  // State-space caches are always split, also where attention heads are replicated.
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

/** First KV head of a remote rank. */
function headOf({ numKvHeads, remoteTpSize }: RemoteHeads, rank: number): number {
  return Math.floor((rank * numKvHeads) / remoteTpSize);
}

/**
 * By rank: the slot of the attention rank that holds the same head. Ranks of other heads are read
 * for their state only, and have slot 0.
 */
function attentionSlots(
  attentionRanks: readonly number[],
  allSourceRanks: readonly number[],
  heads: RemoteHeads,
): Readonly<Record<number, number>> {
  const slots: Record<number, number> = {};
  if (attentionRanks.length === 1) {
    if (allSourceRanks === attentionRanks) return slotZero(attentionRanks[0] as number);
    for (const rank of allSourceRanks) slots[rank] = 0;
    return Object.freeze(slots);
  }
  const slotOfHead = new Map<number, number>();
  for (let slot = 0; slot < attentionRanks.length; slot++)
    slotOfHead.set(headOf(heads, attentionRanks[slot] as number), slot);
  for (const rank of allSourceRanks) slots[rank] = slotOfHead.get(headOf(heads, rank)) ?? 0;
  return Object.freeze(slots);
}

const SLOT_ZERO: readonly Readonly<Record<number, number>>[] = rankSequence(0, 256).map((rank) =>
  Object.freeze({ [rank]: 0 }),
);

function slotZero(rank: number): Readonly<Record<number, number>> {
  return SLOT_ZERO[rank] ?? Object.freeze({ [rank]: 0 });
}

function union(one: readonly number[], other: readonly number[]): readonly number[] {
  return Object.freeze([...new Set([...one, ...other])].sort((a, b) => a - b));
}

const NONE: readonly number[] = Object.freeze([]);

function others(ranks: readonly number[], without: readonly number[]): readonly number[] {
  if (ranks.length === without.length) return NONE;
  return Object.freeze(ranks.filter((rank) => !without.includes(rank)));
}

/**
 * Several remote ranks hold the same KV head when there are fewer heads than ranks. The first rank
 * of each head is read.
 */
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
