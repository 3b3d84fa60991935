import type { GroupExtent } from "../engine/engine-plan-types.js";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";

/**
 * One kind of KV cache: everything that plans must know of it. A kind is one file of this folder and a line in `registry.ts`; see
 * docs/how-to/add-a-cache-kind.md.
 */
export interface CacheKind {
  /** As in `KvCacheGroup.kind`. */
  readonly name: string;
  /**
   * How ranks share it. `heads`: split by KV heads, copied where there are more ranks than heads. `replicated`: whole on every rank.
   * `state`: always split evenly, also where heads are copies.
   */
  readonly sharding: "heads" | "replicated" | "state";
  /** What a request's list of its blocks stands for. */
  readonly extent: GroupExtent;
  /** Only kinds with pieces of their own have it; the others' blocks are heads and tokens (`attention-pieces.ts`). */
  pieces?(context: PieceContext): readonly Piece[];
}

/** One region of both sides, of which pieces are wanted. */
export interface PieceContext {
  readonly local: RankGeometry;
  readonly remote: RankGeometry;
  readonly region: RegionGeometry;
  readonly remoteRegion: RegionGeometry;
}

/** Where the pieces of one block begin on one side: `offsetBytes`, and for each further part `partStrideBytes` more. */
export interface PiecePlace {
  readonly offsetBytes: number;
  readonly partStrideBytes: number;
}

/** The place of a remote rank among those that fill a local block. */
export interface SourcePosition {
  readonly tpRank: number;
  /** Position among the ranks that state is read from. */
  readonly stateIndex: number;
}

/** Bytes of a block that move together; becomes a segment of the plan. */
export interface Piece {
  readonly name: string;
  readonly unit: "kernel-block" | "logical-block";
  readonly localParts: number;
  readonly remoteParts: number;
  readonly lengthBytes: number;
  local(source: SourcePosition): PiecePlace;
  remote(source: SourcePosition): PiecePlace;
}
