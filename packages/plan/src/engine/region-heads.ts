import { computeTpMapping, type TpMapping } from "@kv/topology";
import { invalidPlan } from "../errors.js";
import { whyUncut } from "../geometry/cache-format.js";
import {
  type ModelGeometry,
  type RankGeometry,
  type RegionGeometry,
  SHARED_REGION,
} from "../geometry/rank-geometry.js";
import { cacheKind } from "../kinds/registry.js";
import { readOneReplica } from "./dcp-replicas.js";

/**
 * The groups whose blocks lie in a region. Where all regions name the same group, every group's
 * blocks lie in every region. Otherwise a group's blocks lie in its own regions and in the shared
 * ones.
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

/** By the regions of a rank. Without it, a plan would look at all regions for each region. */
const severalGroups = new WeakMap<readonly RegionGeometry[], boolean>();

function namesSeveralGroups(regions: readonly RegionGeometry[]): boolean {
  let several = severalGroups.get(regions);
  if (several === undefined) {
    several = regions.some(({ groupId }) => groupId !== regions[0]?.groupId);
    severalGroups.set(regions, several);
  }
  return several;
}

/**
 * KV heads of the whole model that a group has in a region; undefined where every rank holds the
 * same bytes.
 */
export function headsOfGroup(
  region: RegionGeometry,
  group: number,
  model: ModelGeometry,
): number | undefined {
  if (region.replicated === true) return undefined;
  if (region.numKvHeads !== undefined) return region.numKvHeads;
  if (cacheKind(model.groups[group] ?? "").sharding === "heads")
    return model.groupKvHeads?.[group] ?? model.numKvHeads;
  return region.replicated === undefined ? undefined : model.numKvHeads;
}

/**
 * KV heads of the whole model in a region: the most of its groups. Undefined where every rank holds
 * the same bytes.
 */
export function headsInRegion(
  rank: RankGeometry,
  region: RegionGeometry,
  model: ModelGeometry,
): number | undefined {
  const groups = groupsOfRegion(rank, region, model).filter(
    (group) => cacheKind(model.groups[group] ?? "").sharding !== "state",
  );
  if (groups.length === 0 && region.replicated !== true)
    return region.numKvHeads ?? model.numKvHeads;
  const heads = groups
    .map((group) => headsOfGroup(region, group, model))
    .filter((each): each is number => each !== undefined);
  return heads.length === 0 ? undefined : Math.max(...heads);
}

/**
 * KV heads in a block of a rank, for a number of heads of the model; 1 where every rank holds the
 * same bytes.
 */
export function headsInBlock(rank: RankGeometry, heads: number | undefined): number {
  return heads === undefined ? 1 : Math.max(1, Math.floor(heads / rank.tpSize));
}

/**
 * Tokens in a kernel block of a group.
 *
 * @throws `KV_PLAN_INVALID` where a logical block does not divide into kernel blocks.
 */
export function kernelTokens(rank: RankGeometry, group: number): number {
  const logical = rank.groupBlockTokens?.[group];
  if (logical === undefined) return rank.kernelBlockSize;
  if (logical % rank.physicalBlocksPerLogical === 0) return logical / rank.physicalBlocksPerLogical;
  throw invalidPlan(
    `group ${group}: blocks of ${logical} tokens do not divide into ${rank.physicalBlocksPerLogical} kernel blocks`,
    { group, logical, physicalBlocksPerLogical: rank.physicalBlocksPerLogical },
  );
}

/**
 * The groups whose blocks in a region are heads and tokens. States have pieces of their own, and
 * blocks without tokens are never cut.
 */
export function groupsOfTokens(
  rank: RankGeometry,
  region: RegionGeometry,
  model: ModelGeometry,
): readonly number[] {
  return groupsOfRegion(rank, region, model).filter((group) => {
    const { sharding, extent } = cacheKind(model.groups[group] ?? "");
    return sharding !== "state" && extent !== "whole";
  });
}

/**
 * Why the blocks of a local region and of its remote one cannot be cut by head or by token, as a
 * clause; undefined where they can.
 */
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
  const { cellBytes, blockLengthBytes } = region;
  if (reason !== undefined) return reason;
  // The page of a hybrid may be padded to the size of a state.
  const isHybrid = groups.length < groupsOfRegion(local, region, model).length;
  for (const group of groups) {
    const heads = headsInBlock(local, headsOfGroup(region, group, model));
    const tokens = kernelTokens(local, group);
    if (
      cellBytes === undefined &&
      (!isHybrid || heads === 1 || blockLengthBytes % (heads * tokens) === 0)
    )
      continue;
    if (heads * tokens * (cellBytes ?? 0) === blockLengthBytes) continue;
    const cells = cellBytes === undefined ? "" : ` of ${cellBytes} bytes`;
    return `a block of ${blockLengthBytes} bytes is not ${heads} heads × ${tokens} tokens${cells}: it is padded or packed`;
  }
  return undefined;
}

/**
 * The mappings of a pair of ranks, by number of KV heads: regions of one model may have different
 * numbers. Each is computed once.
 *
 * @throws `KV_TOPOLOGY_INVALID`, `KV_PLAN_UNSUPPORTED`.
 */
export function mappingsByHeads(
  local: RankGeometry,
  remote: RankGeometry,
  model: ModelGeometry,
): (heads: number | undefined) => TpMapping {
  const made = new Map<number | undefined, TpMapping>();
  const kinds = model.groups.map((kind) =>
    cacheKind(kind).sharding === "state" ? "mamba" : "full",
  );
  return (heads) => {
    const known = made.get(heads);
    if (known !== undefined) return known;
    const mapping = computeTpMapping({
      tpRank: local.tpRank,
      tpSize: local.tpSize,
      remoteTpSize: remote.tpSize,
      dcpSize: local.dcpSize ?? 1,
      remoteDcpSize: remote.dcpSize ?? 1,
      numKvHeads: heads ?? 1,
      isMla: heads === undefined,
      groups: kinds,
    });
    const read = heads === undefined ? readOneReplica(mapping, local, remote) : mapping;
    made.set(heads, read);
    return read;
  };
}
