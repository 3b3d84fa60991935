import type { KvCacheKind } from "@kv/interface";
import type { RankGeometry, RegionGeometry } from "@kv/plan";
import type { ModelCaches } from "../model/model-caches.js";
import type { EngineFlags } from "./engine-flags.js";

/** Two engines, rank by rank. Every input of the command becomes a pair. */
export interface Pair {
  /** Title of the report. */
  readonly title: string;
  /** KV heads of the whole model; 1 for MLA. */
  readonly numKvHeads: number;
  /** Kind of each KV cache group. */
  readonly groups: readonly KvCacheKind[];
  /** KV heads of each group, where groups differ. */
  readonly groupKvHeads?: readonly number[] | undefined;
  /** Type of the cache, as `ModelGeometry.cacheDtype`. */
  readonly cacheDtype?: string | undefined;
  /** By group: tokens of its sliding window; undefined for a group without one. */
  readonly windowTokens: readonly (number | undefined)[];
  /** Ranks of the prefill engine, stage after stage. */
  readonly prefill: readonly RankGeometry[];
  /** Ranks of the decode engine. */
  readonly decode: readonly RankGeometry[];
  /**
   * The source of the geometry: vLLM's rules for an architecture, a file, or the engines
   * themselves.
   */
  readonly plannedFrom?: string | undefined;
  /** Of a pair from models: the caches of prefill's and of decode's model on one rank. */
  readonly caches?: readonly [ModelCaches, ModelCaches] | undefined;
  /** Assumptions that no input states; the report prints them. */
  readonly assumed: readonly string[];
  /**
   * The pair with other settings of the engines, where the input gives the geometry for them.
   * @throws `KV_CONFIG_INVALID`, `KV_PLAN_*`.
   */
  readonly changed?: ((flags: Partial<EngineFlags>) => Pair) | undefined;
}

/**
 * The most ranks of one engine over all stages: more than any engine has, and few enough to plan
 * and prove in minutes.
 */
export const MAX_RANKS = 1024;

const ALIGNMENT_BYTES = 2 ** 21;

/** A rank whose regions may lack an address. */
export type UnplacedRank = Omit<RankGeometry, "regions"> & {
  readonly regions: readonly (Omit<RegionGeometry, "baseAddress"> & {
    readonly baseAddress?: number | undefined;
  })[];
};

/**
 * Gives each region without an address one of its own: one after another, as an engine would
 * allocate them.
 */
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
