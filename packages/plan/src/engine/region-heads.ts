import type { KvCacheConfig } from "@kv/interface";
import { invalidPlan } from "../errors.js";
import { cacheElementBytes, whyUncut } from "../geometry/block-format.js";
import {
  type ModelGeometry,
  type RankGeometry,
  type RegionGeometry,
  SHARED_REGION,
} from "../geometry/rank-geometry.js";
import type { CacheKind } from "../kinds/cache-kind.js";
import { cacheKind } from "../kinds/registry.js";

export function kindOf(model: ModelGeometry, group: number): CacheKind {
  return cacheKind(model.groups[group] ?? "");
}

/**
 * Where all regions name one group, each holds blocks of every group. Otherwise a group's blocks
 * lie in its own regions and the shared ones.
 */
export function groupsOfRegion(
  rank: RankGeometry,
  region: RegionGeometry,
  model: ModelGeometry,
): readonly number[] {
  if (region.groupIds !== undefined) return region.groupIds;
  if (region.groupId !== SHARED_REGION && namesSeveralGroups(rank.regions)) return [region.groupId];
  return [...model.groups.keys()];
}

/** Without it, a plan would look at all regions for each region. */
const severalGroups = new WeakMap<readonly RegionGeometry[], boolean>();

function namesSeveralGroups(regions: readonly RegionGeometry[]): boolean {
  const several =
    severalGroups.get(regions) ?? regions.some(({ groupId }) => groupId !== regions[0]?.groupId);
  severalGroups.set(regions, several);
  return several;
}

export function attentionGroups(
  rank: RankGeometry,
  region: RegionGeometry,
  model: ModelGeometry,
): readonly number[] {
  return groupsOfRegion(rank, region, model).filter(
    (group) => kindOf(model, group).sharding !== "state",
  );
}

/** States have their own pieces, and blocks without tokens are never cut. */
function groupsOfTokens(
  rank: RankGeometry,
  region: RegionGeometry,
  model: ModelGeometry,
): readonly number[] {
  return attentionGroups(rank, region, model).filter(
    (group) => kindOf(model, group).extent !== "whole",
  );
}

/** KV heads of the whole model; undefined where every rank holds the same bytes. */
export function headsOfGroup(
  { replicated, numKvHeads }: RegionGeometry,
  group: number,
  model: ModelGeometry,
): number | undefined {
  if (replicated === true) return undefined;
  if (numKvHeads !== undefined) return numKvHeads;
  if (kindOf(model, group).sharding === "heads")
    return model.groupKvHeads?.[group] ?? model.numKvHeads;
  return replicated === undefined ? undefined : model.numKvHeads;
}

/** The most of the region's groups. Undefined where every rank holds the same bytes. */
export function headsInRegion(
  rank: RankGeometry,
  region: RegionGeometry,
  model: ModelGeometry,
): number | undefined {
  const groups = attentionGroups(rank, region, model);
  if (groups.length === 0 && region.replicated !== true)
    return region.numKvHeads ?? model.numKvHeads;
  const heads = groups.flatMap((group) => headsOfGroup(region, group, model) ?? []);
  return heads.length === 0 ? undefined : Math.max(...heads);
}

/** 1 where every rank holds the same bytes. */
export function headsInBlock(rank: RankGeometry, heads: number | undefined): number {
  return heads === undefined ? 1 : Math.max(1, Math.floor(heads / rank.tpSize));
}

/** @throws `KV_PLAN_INVALID` where a logical block does not divide into kernel blocks. */
export function kernelTokens(rank: RankGeometry, group: number): number {
  const { kernelBlockSize, physicalBlocksPerLogical } = rank;
  const logical = rank.groupBlockTokens?.[group];
  if (logical === undefined) return kernelBlockSize;
  if (logical % physicalBlocksPerLogical === 0) return logical / physicalBlocksPerLogical;
  throw invalidPlan(
    `group ${group}: blocks of ${logical} tokens do not divide into ${physicalBlocksPerLogical} kernel blocks`,
    { group, logical, physicalBlocksPerLogical },
  );
}

/** Returns a clause; undefined where blocks can be cut by head or token. */
export function whyWhole(
  local: RankGeometry,
  remote: RankGeometry,
  region: RegionGeometry,
  model: ModelGeometry,
): string | undefined {
  const groups = groupsOfTokens(local, region, model);
  if (groups.length === 0) return undefined;
  const { cacheDtype = "auto" } = model;
  const reason =
    whyUncut(cacheDtype, local.attentionBackend) ?? whyUncut(cacheDtype, remote.attentionBackend);
  if (reason !== undefined) return reason;
  const { cellBytes, blockLengthBytes } = region;
  // A hybrid's page may be padded to the size of a state.
  const isHybrid = groups.length < groupsOfRegion(local, region, model).length;
  for (const group of groups) {
    const heads = headsInBlock(local, headsOfGroup(region, group, model));
    const tokens = kernelTokens(local, group);
    const isFull =
      cellBytes === undefined
        ? !isHybrid || heads === 1 || blockLengthBytes % (heads * tokens) === 0
        : heads * tokens * cellBytes === blockLengthBytes;
    if (isFull) continue;
    const cells = cellBytes === undefined ? "" : ` of ${cellBytes} bytes`;
    return `a block of ${blockLengthBytes} bytes is not ${heads} heads × ${tokens} tokens${cells}: it is padded or packed`;
  }
  return undefined;
}

/**
 * Adds `cellBytes` to regions without: K and V, one of the two or a latent, of the cache's head
 * size and type. They reveal padded blocks, but where layers differ in head size nothing does, and
 * `cellBytes` stay absent.
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

/** Undefined for a region without tokens, and where groups with unlike blocks share it. */
function cellOf(rank: RankGeometry, region: RegionGeometry, model: ModelGeometry) {
  const [found, ...others] = groupsOfTokens(rank, region, model).map((group) => {
    const heads = headsOfGroup(region, group, model);
    const cells = headsInBlock(rank, heads) * kernelTokens(rank, group);
    return { isSplit: heads !== undefined, bytes: region.blockLengthBytes / cells };
  });
  return others.some(({ bytes }) => bytes !== found?.bytes) ? undefined : found;
}
