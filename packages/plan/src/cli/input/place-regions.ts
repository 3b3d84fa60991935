import type { RankGeometry, RegionGeometry } from "../../geometry/rank-geometry.js";

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
