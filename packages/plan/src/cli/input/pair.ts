import type { KvCacheKind, KvCacheLayout, MemoryType } from "@kv/interface";
import type { RankGeometry, RegionGeometry } from "../../geometry/rank-geometry.js";

/** Two engines, rank by rank, and where the knowledge of them comes from. What every input of the command becomes. */
export interface Pair {
  readonly title: string;
  readonly numKvHeads: number;
  readonly groups: readonly KvCacheKind[];
  /** Tokens that a group's window sees, where it has one. */
  readonly windowTokens: readonly (number | undefined)[];
  /** Rank by rank, stage after stage. */
  readonly prefill: readonly RankGeometry[];
  readonly decode: readonly RankGeometry[];
  /** Statements that no input made. */
  readonly assumed: readonly string[];
  /** The same with another TP size on one side, where the input says how caches lie then. Throws what laying them out throws. */
  readonly withTp?: (side: "prefill" | "decode", tpSize: number) => Pair;
}

/** Ranks of one engine, of all its stages: far more than any has, and as many as are planned and proven in minutes. */
export const MAX_RANKS = 1024;

/** What an engine is started with, beside the model. */
export interface EngineSettings {
  readonly tpSize: number;
  /** Pipeline stages. */
  readonly ppSize: number;
  /** Tokens in a logical block (vLLM: `--block-size`). */
  readonly blockSize: number;
  /** Tokens in a kernel block; a divisor of `blockSize`. */
  readonly kernelBlockSize: number;
  readonly layout: KvCacheLayout;
  readonly attentionBackend: string;
  /** Logical blocks of a rank. */
  readonly numBlocks: number;
  readonly memoryType: MemoryType;
}

const ALIGNMENT_BYTES = 2 ** 21;

/** A rank whose regions may lack an address. */
export type UnplacedRank = Omit<RankGeometry, "regions"> & {
  readonly regions: readonly (Omit<RegionGeometry, "baseAddress"> & {
    readonly baseAddress?: number | undefined;
  })[];
};

/** Gives each region without an address one of its own: one after another, as an engine would allocate them. */
export function placeRegions(rank: UnplacedRank): RankGeometry {
  let next = ALIGNMENT_BYTES;
  return {
    ...rank,
    regions: rank.regions.map((region) => {
      const baseAddress = region.baseAddress ?? next;
      const end = baseAddress + region.numBlocks * region.blockStrideBytes;
      next = Math.ceil(Math.max(next, end) / ALIGNMENT_BYTES) * ALIGNMENT_BYTES;
      return { ...region, baseAddress };
    }),
  };
}
