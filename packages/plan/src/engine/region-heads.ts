import { KvError } from "@kv/interface";
import { computeTpMapping, type TpMapping } from "@kv/topology";
import {
  type ModelGeometry,
  type RankGeometry,
  type RegionGeometry,
  SHARED_REGION,
} from "../geometry/rank-geometry.js";
import { cacheKind } from "../kinds/registry.js";
import { readOneReplica } from "./dcp-replicas.js";

/**
 * Groups whose blocks are in a region. Where all regions name one group, every group's blocks are in every region; else each in its own
 * and in the shared ones.
 */
export function groupsOfRegion(
  rank: RankGeometry,
  region: RegionGeometry,
  model: ModelGeometry,
): readonly number[] {
  const all = [...model.groups.keys()];
  if (region.groupIds !== undefined) return region.groupIds;
  const mapped = rank.regions.some(({ groupId }) => groupId !== region.groupId);
  return all.filter((group) => !mapped || region.groupId === group || region.groupId === SHARED_REGION);
}

/** The KV heads of the whole model that a group has in a region; undefined where they are the same on every rank. */
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

/** The same of all its groups: the most, where they differ. */
export function headsInRegion(
  rank: RankGeometry,
  region: RegionGeometry,
  model: ModelGeometry,
): number | undefined {
  const groups = groupsOfRegion(rank, region, model).filter(
    (group) => cacheKind(model.groups[group] ?? "").sharding !== "state",
  );
  if (groups.length === 0 && region.replicated !== true) return region.numKvHeads ?? model.numKvHeads;
  const heads = groups
    .map((group) => headsOfGroup(region, group, model))
    .filter((each): each is number => each !== undefined);
  return heads.length === 0 ? undefined : Math.max(...heads);
}

/** KV heads in a rank's block of so many of the model's; 1 for what is the same on every rank. */
export function headsInBlock(rank: RankGeometry, heads: number | undefined): number {
  return heads === undefined ? 1 : Math.max(1, Math.floor(heads / rank.tpSize));
}

/** Tokens in a kernel block of a group; groups of one model may differ. */
export function kernelTokens(rank: RankGeometry, group: number): number {
  const logical = rank.groupBlockTokens?.[group];
  if (logical === undefined) return rank.kernelBlockSize;
  if (logical % rank.physicalBlocksPerLogical === 0) return logical / rank.physicalBlocksPerLogical;
  throw new KvError(
    "KV_PLAN_INVALID",
    `group ${group}: blocks of ${logical} tokens do not divide into ${rank.physicalBlocksPerLogical} kernel blocks`,
    { details: { group, logical, physicalBlocksPerLogical: rank.physicalBlocksPerLogical } },
  );
}

/** The mapping of each number of heads that regions of a model have, made once. */
export function mappingsByHeads(
  local: RankGeometry,
  remote: RankGeometry,
  model: ModelGeometry,
): (heads: number | undefined) => TpMapping {
  const made = new Map<number | undefined, TpMapping>();
  const kinds = model.groups.map((kind) => (cacheKind(kind).sharding === "state" ? "mamba" : "full"));
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
