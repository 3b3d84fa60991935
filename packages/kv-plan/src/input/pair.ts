import type { KvCacheKind } from "@kv/interface";
import type { RankGeometry, RegionGeometry } from "@kv/plan";
import type { ModelCaches } from "../model/model-caches.js";
import type { EngineFlags } from "./engine-flags.js";

/** Two engines, rank by rank: what every input of the command becomes. */
export interface Pair {
  readonly title: string;
  /** KV heads of the whole model; 1 for MLA. */
  readonly numKvHeads: number;
  readonly groups: readonly KvCacheKind[];
  /** KV heads by group, where groups differ. */
  readonly groupKvHeads?: readonly number[] | undefined;
  /** Element type, as in `ModelGeometry.cacheDtype`. */
  readonly cacheDtype?: string | undefined;
  /** Tokens of each group's sliding window; undefined without one. */
  readonly windowTokens: readonly (number | undefined)[];
  /** Ranks of prefill, stage after stage. */
  readonly prefill: readonly RankGeometry[];
  readonly decode: readonly RankGeometry[];
  /** Source of the geometry: rules of an architecture, a file, or the engines. */
  readonly plannedFrom?: string | undefined;
  /** Caches of prefill's and decode's model on one rank. */
  readonly caches?: readonly [ModelCaches, ModelCaches] | undefined;
  /** Assumptions that the report prints. */
  readonly assumed: readonly string[];
  /**
   * The pair with other engine settings, where the input allows them.
   * @throws `KV_CONFIG_INVALID`, `KV_PLAN_*`.
   */
  readonly changed?: ((flags: Partial<EngineFlags>) => Pair) | undefined;
}

/** The most ranks of one engine over all stages: more than any has, yet proven in minutes. */
export const MAX_RANKS = 1024;

const ALIGNMENT_BYTES = 2 ** 21;

export type UnplacedRank = Omit<RankGeometry, "regions"> & {
  readonly regions: readonly (Omit<RegionGeometry, "baseAddress"> & {
    readonly baseAddress?: number | undefined;
  })[];
};

/** Regions without an address get free ones, one after another as in an engine. */
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
