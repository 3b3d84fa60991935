import { incompatible, invalidPlan } from "../errors.js";
import {
  type PackedMember,
  type RankGeometry,
  type RegionGeometry,
  SHARED_REGION,
} from "../geometry/rank-geometry.js";

export interface AlignedRank {
  /** One region for each of `localRegions`. */
  readonly geometry: RankGeometry;
  /** Those that the rank holds. */
  readonly localRegions: readonly number[];
  /** Index of each in the rank's own list. */
  readonly remoteRegions: readonly number[];
}

/**
 * Pairs the regions of both sides: in order, or by name for pipeline stages. A row that packs
 * several layers becomes a region per page where the local rank has one per layer. (vLLM 0.33:
 * `_align_remote_regions_by_layer`, `_split_remote_packed_rows`.)
 *
 * @throws `KV_PLAN_INCOMPATIBLE` with the missing caches, `KV_PLAN_INVALID` for a cache in two
 * regions or a page that leaves its row.
 */
export function alignRegions(local: RankGeometry, remote: RankGeometry): AlignedRank {
  const [mine, theirs] = [local.packedMembers, remote.packedMembers];
  if (mine !== undefined && JSON.stringify(sorted(mine)) !== JSON.stringify(sorted(theirs ?? {}))) {
    throw incompatible(
      "rows of blocks that pack several layers must pack them alike",
      Object.keys(mine),
      Object.keys(theirs ?? {}),
      "use the same KV cache layout and block size on both sides",
    );
  }
  if (theirs !== undefined && mine === undefined) return byName(local, remote, theirs);
  const staged = (local.ppSize ?? 1) > 1 || (remote.ppSize ?? 1) > 1;
  if (staged) return byName(local, remote, {});
  const indices = [...local.regions.keys()];
  return { geometry: remote, localRegions: indices, remoteRegions: indices };
}

function byName(
  local: RankGeometry,
  remote: RankGeometry,
  packed: Readonly<Record<string, PackedMember>>,
): AlignedRank {
  const holders = new Map<string, number>();
  for (const [index, region] of remote.regions.entries()) {
    const names = new Set([region.name, ...(region.members ?? [])]);
    for (const name of names) {
      if (holders.has(name)) {
        throw invalidPlan(
          `remote rank ${remote.tpRank}: cache "${name}" is in regions ${holders.get(name)} and ${index}`,
        );
      }
      holders.set(name, index);
    }
  }
  const row = remote.regions.findIndex((region) => region.name in packed);
  const localRegions: number[] = [];
  const remoteRegions: number[] = [];
  const regions: RegionGeometry[] = [];
  for (const [index, region] of local.regions.entries()) {
    const member = packed[region.name];
    const holder = holders.get(region.name) ?? (member === undefined ? -1 : row);
    const found = remote.regions[holder];
    if (found === undefined) continue;
    localRegions.push(index);
    remoteRegions.push(holder);
    regions.push(
      member === undefined ? { ...found, name: region.name } : pageOf(found, region, member),
    );
  }
  const stages = Math.max(local.ppSize ?? 1, remote.ppSize ?? 1);
  const missing = local.regions
    .filter((_, index) => !localRegions.includes(index))
    .map(({ name }) => name);
  // Only a remote stage may lack some of the local layers.
  if (missing.length > 0 && ((remote.ppSize ?? 1) === 1 || regions.length === 0)) {
    throw incompatible(
      `the remote rank lacks caches of the local one${stages > 1 ? " (matched by name)" : ""}`,
      missing,
      remote.regions.map(({ name }) => name),
    );
  }
  return { geometry: { ...remote, regions }, localRegions, remoteRegions };
}

function pageOf(row: RegionGeometry, local: RegionGeometry, member: PackedMember): RegionGeometry {
  const { offsetBytes, lengthBytes } = member;
  if (offsetBytes + lengthBytes > row.blockLengthBytes) {
    throw invalidPlan(
      `cache "${local.name}": ${lengthBytes} bytes at ${offsetBytes} leave the row of ${row.blockLengthBytes} bytes that packs it`,
    );
  }
  return {
    ...row,
    name: local.name,
    baseAddress: row.baseAddress + offsetBytes,
    blockLengthBytes: lengthBytes,
    // Several groups may share the row, but each page has one group.
    groupId: local.groupId,
  };
}

function sorted(members: Readonly<Record<string, PackedMember>>) {
  return Object.entries(members).sort();
}

/**
 * A local stage whose layers are all of one group does not show that other groups have their own
 * regions; the remote side does.
 */
export function withStageGroups(
  local: RankGeometry,
  remotes: readonly RankGeometry[],
): RankGeometry {
  if ((local.ppSize ?? 1) === 1) return local;
  const named = new Set(
    [local, ...remotes].flatMap(({ regions }) => regions.map(({ groupId }) => groupId)),
  );
  if (named.size === 1) return local;
  const regions = local.regions.map((region) => {
    const { groupId, groupIds } = region;
    return groupIds !== undefined || groupId === SHARED_REGION
      ? region
      : { ...region, groupIds: [groupId] };
  });
  return { ...local, regions };
}
