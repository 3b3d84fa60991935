import { type DescriptorTable, KvError, type MemoryType } from "@kv/interface";
import { targetRemoteRanks } from "@kv/topology";
import { MAX_DESCRIPTORS } from "../geometry/geometry-checks.js";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { SourcePosition } from "../kinds/cache-kind.js";
import type { AlignedRank } from "./align-regions.js";
import { indexingOf, type RegionIndexing, type SegmentSide, tableOf } from "./descriptor-tables.js";
import type { PairContext, RegionPiece } from "./segments.js";

/** One remote rank that is read, with the descriptor tables of its transfers. */
export interface SourcePlan {
  /** Tensor-parallel rank. */
  readonly remoteRank: number;
  /** Pipeline stage of the rank. */
  readonly remotePpRank: number;
  /** Groups that are read from this rank, ascending. */
  readonly groups: readonly number[];
  /**
   * Indices of the segments that are read from this rank, ascending. A pipeline stage holds some of
   * them.
   */
  readonly segments: readonly number[];
  /** One list for each pair of memory types. */
  readonly lists: readonly TransferList[];
  /** By segment: its place in the remote tables of this rank. */
  readonly remoteIndexing: readonly RegionIndexing[];
  /** `localListKey` of the first list. Most plans have one key for all sources. */
  readonly localListKey: string;
  /** `localTable` of the first list. Built at first use. */
  readonly localTable: DescriptorTable;
  /** `remoteTable` of the first list. Built at first use. */
  readonly remoteTable: DescriptorTable;
}

/**
 * Two descriptor tables whose descriptors a transfer pairs by index. Each table lies in one type of
 * memory.
 */
export interface TransferList {
  /** Memory of the local table. */
  readonly localMemoryType: MemoryType;
  /** Memory of the remote table. */
  readonly remoteMemoryType: MemoryType;
  /**
   * Identifies the content of `localTable` among all plans of one local rank: prepare one list per
   * key, and share it.
   */
  readonly localListKey: string;
  /**
   * Descriptors of the local rank. Built at first use; the number of rows does not depend on the
   * number of blocks.
   */
  readonly localTable: DescriptorTable;
  /** Descriptors of the remote rank. Built at first use. */
  readonly remoteTable: DescriptorTable;
}

/**
 * Rows of descriptors of one shape: commonly a region. The pieces of a state, and the heads of a
 * region in the direct form, are segments of their own. The position in
 * `EngineTransferPlan.segments` is the order in the tables: attention first, then state.
 */
export interface SegmentPlan {
  /** Index into the regions of the local rank. */
  readonly region: number;
  /** Index into the regions of `EngineTransferPlan.remote`. */
  readonly remoteRegion: number;
  /**
   * Name of the piece among those of its region, such as "conv 1", "state" or "head 3"; empty for a
   * whole region.
   */
  readonly piece: string;
  /** Unit in which blocks are counted. A state is never divided, so it counts logical blocks. */
  readonly unit: "kernel-block" | "logical-block";
  /** Descriptors of one local block. */
  readonly localParts: number;
  /** Descriptors of one remote block. A local and a remote part stand for equally many tokens. */
  readonly remoteParts: number;
  /** Index into the lists of every source. Each pair of memory types has a list. */
  readonly list: number;
  /** Bytes of one descriptor. */
  readonly lengthBytes: number;
}

const NOWHERE: RegionIndexing = Object.freeze({ offset: 0, count: 0, blockStep: 0, partStep: 0 });

/** The segments of a plan: a segment for each piece, in a list for its pair of memory types. */
export function segmentPlans(
  pieces: readonly RegionPiece[],
  stages: readonly AlignedRank[],
): readonly SegmentPlan[] {
  const lists = listsOf(pieces);
  return Object.freeze(
    pieces.map(({ pair, piece }): SegmentPlan => {
      const stage = stages.find(({ localRegions }) =>
        localRegions.includes(pair.index),
      ) as AlignedRank;
      return Object.freeze({
        region: pair.index,
        remoteRegion: stage.remoteRegions[stage.localRegions.indexOf(pair.index)] as number,
        piece: piece.name,
        unit: piece.unit,
        localParts: piece.localParts,
        remoteParts: piece.remoteParts,
        list: lists.findIndex((types) => isOf(types, pair)),
        lengthBytes: piece.lengthBytes,
      });
    }),
  );
}

type MemoryTypes = readonly [local: MemoryType, remote: MemoryType];

function isOf(
  [local, remote]: MemoryTypes,
  { region, remoteRegion }: RegionPiece["pair"],
): boolean {
  return region.memoryType === local && remoteRegion.memoryType === remote;
}

function listsOf(pieces: readonly RegionPiece[]): readonly MemoryTypes[] {
  const lists: MemoryTypes[] = [];
  for (const { pair } of pieces) {
    if (!lists.some((types) => isOf(types, pair)))
      lists.push([pair.region.memoryType, pair.remoteRegion.memoryType]);
  }
  return lists;
}

/** Input of `sourcePlans`. */
export interface SourcesOptions {
  readonly context: PairContext;
  readonly pieces: readonly RegionPiece[];
  readonly segments: readonly SegmentPlan[];
  readonly stages: readonly {
    readonly ranks: ReadonlyMap<number, RankGeometry>;
    readonly aligned: AlignedRank;
  }[];
}

/**
 * The remote ranks that are read, with their tables. Local indices are the same for all of them.
 *
 * @throws `KV_PLAN_UNSUPPORTED` for more descriptors than can be indexed, `KV_PLAN_INVALID`.
 */
export function sourcePlans(options: SourcesOptions): {
  readonly plans: readonly SourcePlan[];
  readonly localIndexing: readonly RegionIndexing[];
} {
  const { context, pieces, stages } = options;
  const { local } = context;
  const localIndexing = indexAll(
    options,
    local,
    [...pieces.keys()],
    ({ pair }) => pair.region,
    "localParts",
  );
  const plans: SourcePlan[] = [];
  for (const { ranks, aligned } of stages) {
    const here = [...pieces.keys()].filter((index) =>
      aligned.localRegions.includes((pieces[index] as RegionPiece).pair.index),
    );
    for (const tpRank of sourceRanks(pieces)) {
      const remote = ranks.get(tpRank);
      if (remote === undefined) continue;
      const moved = here.filter((index) => (pieces[index] as RegionPiece).ranks.includes(tpRank));
      plans.push(sourcePlan({ ...options, remote, aligned, here, moved }));
    }
  }
  return { plans: Object.freeze(plans), localIndexing };
}

function sourceRanks(pieces: readonly RegionPiece[]): readonly number[] {
  return [...new Set(pieces.flatMap(({ ranks }) => ranks))].sort((one, other) => one - other);
}

interface SourceOptions extends SourcesOptions {
  readonly remote: RankGeometry;
  readonly aligned: AlignedRank;
  /** Pieces in the regions of the stage: they have rows in the tables. */
  readonly here: readonly number[];
  /** Pieces of `here` that are read from this rank. */
  readonly moved: readonly number[];
}

function sourcePlan(options: SourceOptions): SourcePlan {
  const { context, pieces, remote, aligned, here, moved } = options;
  const remoteRegion = ({ pair }: RegionPiece) =>
    remote.regions[aligned.localRegions.indexOf(pair.index)] as RegionGeometry;
  const { tpRank, tpSize } = context.local;
  // The order is that of the pieces of state that the ranks fill.
  const states = targetRemoteRanks({ tpRank, tpSize, remoteTpSize: remote.tpSize });
  const position: SourcePosition = {
    tpRank: remote.tpRank,
    stateIndex: Math.max(0, states.indexOf(remote.tpRank)),
  };
  const side = (which: "local" | "remote", index: number): SegmentSide => {
    const one = pieces[index] as RegionPiece;
    const { unit, lengthBytes } = one.piece;
    return {
      region: which === "local" ? one.pair.region : remoteRegion(one),
      unit,
      lengthBytes,
      parts: which === "local" ? one.piece.localParts : one.piece.remoteParts,
      place: one.piece[which](position),
    };
  };
  const lists = listsOf(pieces).map((types, list): TransferList => {
    const inList = (indices: readonly number[]) =>
      indices.filter((index) => isOf(types, (pieces[index] as RegionPiece).pair));
    const mine = inList([...pieces.keys()]);
    const theirs = inList(here);
    let localTable: DescriptorTable | undefined;
    let remoteTable: DescriptorTable | undefined;
    return Object.freeze({
      localMemoryType: types[0],
      remoteMemoryType: types[1],
      localListKey: listKey(context.local, mine, (index) => side("local", index), list),
      get localTable() {
        localTable ??= tableOf(
          context.local,
          mine.map((index) => side("local", index)),
        );
        return localTable;
      },
      get remoteTable() {
        remoteTable ??= tableOf(
          remote,
          theirs.map((index) => side("remote", index)),
        );
        return remoteTable;
      },
    });
  });
  const [first] = lists as [TransferList];
  const groups = new Set(moved.flatMap((index) => (pieces[index] as RegionPiece).groups));
  return Object.freeze({
    remoteRank: remote.tpRank,
    remotePpRank: remote.ppRank ?? 0,
    groups: Object.freeze([...groups].sort((one, other) => one - other)),
    segments: Object.freeze(moved),
    lists: Object.freeze(lists),
    remoteIndexing: indexAll(options, remote, here, remoteRegion, "remoteParts"),
    localListKey: first.localListKey,
    get localTable() {
      return first.localTable;
    },
    get remoteTable() {
      return first.remoteTable;
    },
  });
}

/**
 * The places of segments within their lists; `NOWHERE` for segments that the rank does not hold.
 */
function indexAll(
  { pieces, segments }: SourcesOptions,
  rank: RankGeometry,
  here: readonly number[],
  regionOf: (piece: RegionPiece) => RegionGeometry,
  parts: "localParts" | "remoteParts",
): readonly RegionIndexing[] {
  const next: number[] = [];
  const present = new Set(here);
  return Object.freeze(
    pieces.map((one, index) => {
      if (!present.has(index)) return NOWHERE;
      const { list } = segments[index] as SegmentPlan;
      const { unit, lengthBytes } = one.piece;
      const place = one.piece[parts === "localParts" ? "local" : "remote"]({
        tpRank: rank.tpRank,
        stateIndex: 0,
      });
      const side = { region: regionOf(one), unit, lengthBytes, parts: one.piece[parts], place };
      const indexing = indexingOf(rank, side, next[list] ?? 0);
      next[list] = indexing.offset + indexing.count;
      requireIndexable(rank, next[list]);
      return indexing;
    }),
  );
}

function requireIndexable(rank: RankGeometry, descriptors: number): void {
  if (descriptors <= MAX_DESCRIPTORS) return;
  throw new KvError(
    "KV_PLAN_UNSUPPORTED",
    `rank ${rank.tpRank}: ${descriptors} descriptors in one list, at most ${MAX_DESCRIPTORS} can be indexed`,
    {
      hint: "use equal block sizes and one layout on both sides: blocks need not be cut then",
      details: { tpRank: rank.tpRank, descriptors },
    },
  );
}

/** A key of the local table among plans of one local rank: equal keys mean equal tables. */
function listKey(
  local: RankGeometry,
  indices: readonly number[],
  sideOf: (index: number) => SegmentSide,
  list: number,
): string {
  const shapes: string[] = [];
  const perRegion = new Map<number, string[]>();
  for (const index of indices) {
    const { region, unit, parts, lengthBytes, place } = sideOf(index);
    const { offsetBytes, partStrideBytes } = place;
    const at = local.regions.indexOf(region);
    const share = unit === "logical-block" ? "state " : "";
    const said = `${share}${lengthBytes}@${offsetBytes}${parts === 1 ? "" : `/${parts}*${partStrideBytes}`}`;
    perRegion.set(at, [...(perRegion.get(at) ?? []), said]);
  }
  const sequence = [...perRegion].map(([region, pieces]) => {
    const shape = pieces.join(" ");
    if (!shapes.includes(shape)) shapes.push(shape);
    return `${region}:${shapes.indexOf(shape)}`;
  });
  const regular = shapes.length === 1 && sequence.length === local.regions.length;
  return `list ${list}: ${shapes.join(" | ")}${regular ? "" : ` = ${sequence.join(",")}`}`;
}
