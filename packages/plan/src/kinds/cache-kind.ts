import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";

/**
 * The part of a sequence that a list of blocks holds. `sequence`: all of it, from the first token.
 * `window`: its end. `state`: the last block is the state after the last token, and no other block
 * is moved. `whole`: blocks without tokens, which are moved one by one.
 */
export type GroupExtent = "sequence" | "window" | "state" | "whole";

/**
 * One kind of KV cache: all that plans need to know of it. Those of this package are listed in
 * `registry.ts`, others are added with `registerCacheKind`; see docs/how-to/add-a-cache-kind.md.
 */
export interface CacheKind {
  /** The name in `KvCacheGroup.kind`. */
  readonly name: string;
  /**
   * How ranks share the cache. `heads`: split by KV heads, with replicas where there are more ranks
   * than heads. `replicated`: whole on every rank. `state`: always split evenly, also where heads
   * are replicated.
   */
  readonly sharding: "heads" | "replicated" | "state";
  /** The part of a sequence that a request's list of blocks holds. */
  readonly extent: GroupExtent;
  /**
   * The pieces of a block. Absent for kinds whose blocks are heads and tokens
   * (`attention-pieces.ts`).
   *
   * @throws `KV_PLAN_INVALID`, `KV_PLAN_INCOMPATIBLE`.
   */
  pieces?(context: PieceContext): readonly Piece[];
}

/** One region on both sides, for `CacheKind.pieces`. */
export interface PieceContext {
  /** The local rank. */
  readonly local: RankGeometry;
  /** One of the remote ranks. */
  readonly remote: RankGeometry;
  /** The region of the local rank. */
  readonly region: RegionGeometry;
  /** The region of the remote rank. */
  readonly remoteRegion: RegionGeometry;
}

/**
 * The place of a piece within a block of one side. Part `p` begins at
 * `offsetBytes + p * partStrideBytes`.
 */
export interface PiecePlace {
  /** Bytes from the begin of the block to the first part. */
  readonly offsetBytes: number;
  /** Bytes from one part to the next. */
  readonly partStrideBytes: number;
}

/** A remote rank among those that fill a local block. */
export interface SourcePosition {
  /** Tensor-parallel rank of the source. */
  readonly tpRank: number;
  /** Index among the ranks that state is read from. */
  readonly stateIndex: number;
}

/** Bytes of a block that move together. Each piece becomes a segment of the plan. */
export interface Piece {
  /** Name within its region, such as "conv 0". */
  readonly name: string;
  /** Unit in which blocks are counted. */
  readonly unit: "kernel-block" | "logical-block";
  /** Parts of a local block. */
  readonly localParts: number;
  /** Parts of a remote block. */
  readonly remoteParts: number;
  /** Bytes of one part. */
  readonly lengthBytes: number;
  /** The place in a local block that a source fills. */
  local(source: SourcePosition): PiecePlace;
  /** The place in a block of a source. */
  remote(source: SourcePosition): PiecePlace;
}
