import type { KvCacheConfig } from "@kv/interface";
import { cacheElementBytes } from "../geometry/cache-format.js";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { groupsOfTokens, headsInBlock, headsOfGroup, kernelTokens } from "./region-heads.js";

/** A region's bytes for each head and token, and whether ranks share its heads. */
interface Cell {
  readonly isSplit: boolean;
  readonly bytes: number;
}

/**
 * A rank with `cellBytes` in its regions, by which padded blocks are known: K and V, or one of the
 * two or a latent, of the cache's head size and type. Regions that have `cellBytes` keep them.
 * Heads may have another size in some layers: blocks of unlike cells then say nothing of padding,
 * and `cellBytes` stay absent.
 */
export function withCellBytes(
  rank: RankGeometry,
  model: ModelGeometry,
  { headSize, dtype }: Pick<KvCacheConfig, "headSize" | "dtype">,
): RankGeometry {
  const element = cacheElementBytes(model.cacheDtype ?? "auto", dtype);
  if (element === undefined) return rank;
  const row = headSize * element;
  const cells = rank.regions.map((region) => cellOf(rank, region, model));
  const split = new Set(cells.flatMap((cell) => (cell?.isSplit === true ? [cell.bytes] : [])));
  const regions = rank.regions.map((region, index) => {
    const cell = cells[index];
    if (region.cellBytes !== undefined || cell === undefined) return region;
    if (cell.isSplit && split.size > 1) return region;
    return { ...region, cellBytes: cell.bytes === row ? row : 2 * row };
  });
  return { ...rank, regions };
}

/** Undefined for a region without tokens, and where groups with unlike blocks share the region. */
function cellOf(
  rank: RankGeometry,
  region: RegionGeometry,
  model: ModelGeometry,
): Cell | undefined {
  let found: Cell | undefined;
  for (const group of groupsOfTokens(rank, region, model)) {
    const heads = headsOfGroup(region, group, model);
    const cells = headsInBlock(rank, heads) * kernelTokens(rank, group);
    const cell = { isSplit: heads !== undefined, bytes: region.blockLengthBytes / cells };
    if (found !== undefined && found.bytes !== cell.bytes) return undefined;
    found = cell;
  }
  return found;
}
