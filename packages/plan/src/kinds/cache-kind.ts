import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";

/**
 * What a list of blocks holds of a sequence. `sequence`: all. `window`: its end. `state`: the state
 * after the last token, in the last block, which alone moves. `whole`: no tokens; blocks move one
 * by one.
 */
export type GroupExtent = "sequence" | "window" | "state" | "whole";

/**
 * What plans need to know of a kind of KV cache. `registerCacheKind` adds one; see
 * docs/how-to/add-a-cache-kind.md.
 */
export interface CacheKind {
  readonly name: string;
  /**
   * How ranks share the cache. `heads`: by KV heads, replicated where ranks outnumber them.
   * `replicated`: whole on every rank. `state`: always split evenly.
   */
  readonly sharding: "heads" | "replicated" | "state";
  readonly extent: GroupExtent;
  /**
   * The pieces of a block. Absent where blocks are heads and tokens.
   *
   * @throws `KV_PLAN_INVALID`, `KV_PLAN_INCOMPATIBLE`.
   */
  pieces?(context: PieceContext): readonly Piece[];
}

/** One region on both sides, for `CacheKind.pieces`. */
export interface PieceContext {
  readonly local: RankGeometry;
  readonly remote: RankGeometry;
  readonly region: RegionGeometry;
  readonly remoteRegion: RegionGeometry;
}

/**
 * Where a piece lies in a block of one side: part `p` begins at
 * `offsetBytes + p * partStrideBytes`.
 */
export interface PiecePlace {
  readonly offsetBytes: number;
  readonly partStrideBytes: number;
}

/** A remote rank among those that fill a local block. */
export interface SourcePosition {
  readonly tpRank: number;
  /** Index among the ranks that state is read from. */
  readonly stateIndex: number;
}

/** Bytes of a block that move together. Each piece becomes a segment of the plan. */
export interface Piece {
  /** Unique in its region, such as "conv 0". */
  readonly name: string;
  readonly unit: "kernel-block" | "logical-block";
  readonly localParts: number;
  readonly remoteParts: number;
  readonly lengthBytes: number;
  /** Place in a local block that a source fills. */
  local(source: SourcePosition): PiecePlace;
  /** Place in a source's block. */
  remote(source: SourcePosition): PiecePlace;
}
