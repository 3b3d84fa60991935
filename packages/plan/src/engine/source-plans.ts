import { type DescriptorTable, KvError, type MemoryType } from "@kv/interface";
import { targetRemoteRanks } from "@kv/topology";
import { MAX_DESCRIPTORS } from "../geometry/geometry-checks.js";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { SourcePosition } from "../kinds/cache-kind.js";
import type { AlignedRank } from "./align-regions.js";
import { indexingOf, type RegionIndexing, type SegmentSide, tableOf } from "./descriptor-tables.js";
import type { RegionPair, RegionPiece } from "./pieces.js";

/** One remote rank that is read, with the descriptor tables of its transfers. */
export interface SourcePlan {
  readonly remoteRank: number;
  readonly remotePpRank: number;
  readonly groups: readonly number[];
  /** A pipeline stage holds only some. */
  readonly segments: readonly number[];
  readonly lists: readonly TransferList[];
  readonly remoteIndexing: readonly RegionIndexing[];
  /** `localListKey` of the first list; in most plans all sources have the same. */
  readonly localListKey: string;
  /** The first list's table. */
  readonly localTable: DescriptorTable;
  /** The first list's table. */
  readonly remoteTable: DescriptorTable;
}

/** Two descriptor tables that a transfer pairs by index. Each lies in one type of memory. */
export interface TransferList {
  readonly localMemoryType: MemoryType;
  readonly remoteMemoryType: MemoryType;
  /** Equal keys of one local rank mean equal `localTable`s, so prepare one list per key. */
  readonly localListKey: string;
  /** Built at first use; rows do not grow with blocks. */
  readonly localTable: DescriptorTable;
  /** Built at first use. */
  readonly remoteTable: DescriptorTable;
}

/**
 * Descriptors of one shape: usually a region; else a piece of a state, or a head in the form
 * `direct`. Attention comes first, then state.
 */
export interface SegmentPlan {
  readonly region: number;
  /** Index into the regions of `EngineTransferPlan.remote`. */
  readonly remoteRegion: number;
  /** Such as "conv 1", "state" or "head 3"; empty for a whole region. */
  readonly piece: string;
  /** A state is never divided, so it counts logical blocks. */
  readonly unit: "kernel-block" | "logical-block";
  readonly localParts: number;
  /** Parts of a remote block; a local and a remote part stand for equally many tokens. */
  readonly remoteParts: number;
  /** Index into the lists of every source; each pair of memory types has one. */
  readonly list: number;
  readonly lengthBytes: number;
}

const NOWHERE: RegionIndexing = Object.freeze({ offset: 0, count: 0, blockStep: 0, partStep: 0 });

export interface SourceStage {
  readonly ranks: ReadonlyMap<number, RankGeometry>;
  readonly aligned: AlignedRank;
}

export interface Sources {
  readonly segments: readonly SegmentPlan[];
  readonly sources: readonly SourcePlan[];
  readonly localIndexing: readonly RegionIndexing[];
}

/** @throws `KV_PLAN_UNSUPPORTED` for more descriptors than can be indexed, `KV_PLAN_INVALID`. */
export function sourcePlans(
  local: RankGeometry,
  pieces: readonly RegionPiece[],
  stages: readonly SourceStage[],
): Sources {
  const types: string[] = [];
  const segments = pieces.map(({ pair, piece }): SegmentPlan => {
    const { index: region } = pair;
    const ofBoth = `${pair.region.memoryType} ${pair.remoteRegion.memoryType}`;
    if (!types.includes(ofBoth)) types.push(ofBoth);
    const stage = stages.find(({ aligned }) => aligned.localRegions.includes(region));
    const { localRegions, remoteRegions } = (stage as SourceStage).aligned;
    return Object.freeze({
      region,
      remoteRegion: remoteRegions[localRegions.indexOf(region)] as number,
      piece: piece.name,
      unit: piece.unit,
      localParts: piece.localParts,
      remoteParts: piece.remoteParts,
      list: types.indexOf(ofBoth),
      lengthBytes: piece.lengthBytes,
    });
  });
  const ranks = [...new Set(pieces.flatMap((piece) => piece.ranks))].sort((a, b) => a - b);
  const sources = stages.flatMap((stage) =>
    ranks.flatMap((tpRank) => {
      const remote = stage.ranks.get(tpRank);
      if (remote === undefined) return [];
      return [sourcePlan(local, remote, { pieces, segments }, stage.aligned.localRegions)];
    }),
  );
  const sides = sidesOf(pieces, "local", { tpRank: local.tpRank, stateIndex: 0 }, mine);
  return {
    segments: Object.freeze(segments),
    sources: Object.freeze(sources),
    localIndexing: indexAll(local, segments, sides),
  };
}

/** Undefined where the rank does not hold the region. */
type Sides = readonly (SegmentSide | undefined)[];

const mine = ({ region }: RegionPair) => region;

function sidesOf(
  pieces: readonly RegionPiece[],
  which: "local" | "remote",
  position: SourcePosition,
  regionOf: (pair: RegionPair) => RegionGeometry | undefined,
): Sides {
  return pieces.map(({ pair, piece }): SegmentSide | undefined => {
    const region = regionOf(pair);
    const { unit, lengthBytes } = piece;
    const parts = which === "local" ? piece.localParts : piece.remoteParts;
    return region && { region, unit, lengthBytes, parts, place: piece[which](position) };
  });
}

function sourcePlan(
  local: RankGeometry,
  remote: RankGeometry,
  { pieces, segments }: { pieces: readonly RegionPiece[]; segments: readonly SegmentPlan[] },
  localRegions: readonly number[],
): SourcePlan {
  const { tpRank, tpSize } = local;
  // In the order of the pieces of state that the ranks fill.
  const states = targetRemoteRanks({ tpRank, tpSize, remoteTpSize: remote.tpSize });
  const position = {
    tpRank: remote.tpRank,
    stateIndex: Math.max(0, states.indexOf(remote.tpRank)),
  };
  const locals = sidesOf(pieces, "local", position, mine);
  const remotes = sidesOf(
    pieces,
    "remote",
    position,
    ({ index }) => remote.regions[localRegions.indexOf(index)],
  );
  const moved = [...pieces.entries()].flatMap(([index, { ranks }]) =>
    remotes[index] !== undefined && ranks.includes(remote.tpRank) ? [index] : [],
  );
  const groups = new Set(moved.flatMap((index) => pieces[index]?.groups ?? []));
  const lists = [...new Set(segments.map(({ list }) => list))].map((list): TransferList => {
    const inList = (sides: Sides) =>
      sides.flatMap((side, index) => (segments[index]?.list === list ? (side ?? []) : []));
    const [ours, theirs] = [inList(locals), inList(remotes)];
    const { pair } = pieces[segments.findIndex((one) => one.list === list)] as RegionPiece;
    let localTable: DescriptorTable | undefined;
    let remoteTable: DescriptorTable | undefined;
    return Object.freeze({
      localMemoryType: pair.region.memoryType,
      remoteMemoryType: pair.remoteRegion.memoryType,
      localListKey: listKey(local, ours, list),
      get localTable() {
        localTable ??= tableOf(local, ours);
        return localTable;
      },
      get remoteTable() {
        remoteTable ??= tableOf(remote, theirs);
        return remoteTable;
      },
    });
  });
  const [first] = lists as [TransferList];
  return Object.freeze({
    remoteRank: remote.tpRank,
    remotePpRank: remote.ppRank ?? 0,
    groups: Object.freeze([...groups].sort((one, other) => one - other)),
    segments: Object.freeze(moved),
    lists: Object.freeze(lists),
    remoteIndexing: indexAll(remote, segments, remotes),
    localListKey: first.localListKey,
    get localTable() {
      return first.localTable;
    },
    get remoteTable() {
      return first.remoteTable;
    },
  });
}

function indexAll(
  rank: RankGeometry,
  segments: readonly SegmentPlan[],
  sides: Sides,
): readonly RegionIndexing[] {
  const next: number[] = [];
  return Object.freeze(
    sides.map((side, index) => {
      if (side === undefined) return NOWHERE;
      const { list } = segments[index] as SegmentPlan;
      const indexing = indexingOf(rank, side, next[list] ?? 0);
      const descriptors = indexing.offset + indexing.count;
      if (descriptors > MAX_DESCRIPTORS) {
        throw new KvError(
          "KV_PLAN_UNSUPPORTED",
          `rank ${rank.tpRank}: ${descriptors} descriptors in one list, at most ${MAX_DESCRIPTORS} can be indexed`,
          {
            hint: "use equal block sizes and one layout on both sides: blocks need not be cut then",
            details: { tpRank: rank.tpRank, descriptors },
          },
        );
      }
      next[list] = descriptors;
      return indexing;
    }),
  );
}

/** Equal keys of one local rank mean equal tables. */
function listKey(local: RankGeometry, sides: readonly SegmentSide[], list: number): string {
  const perRegion = new Map<number, string[]>();
  for (const { region, unit, parts, lengthBytes, place } of sides) {
    const at = local.regions.indexOf(region);
    const state = unit === "logical-block" ? "state " : "";
    const steps = parts === 1 ? "" : `/${parts}*${place.partStrideBytes}`;
    const said = `${state}${lengthBytes}@${place.offsetBytes}${steps}`;
    perRegion.set(at, [...(perRegion.get(at) ?? []), said]);
  }
  const shapes: string[] = [];
  const sequence = [...perRegion].map(([region, pieces]) => {
    const shape = pieces.join(" ");
    if (!shapes.includes(shape)) shapes.push(shape);
    return `${region}:${shapes.indexOf(shape)}`;
  });
  const regular = shapes.length === 1 && sequence.length === local.regions.length;
  return `list ${list}: ${shapes.join(" | ")}${regular ? "" : ` = ${sequence.join(",")}`}`;
}
