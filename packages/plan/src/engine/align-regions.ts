import { KvError } from "@kv/interface";
import { incompatible } from "../errors.js";
import {
  type PackedMember,
  type RankGeometry,
  type RegionGeometry,
  SHARED_REGION,
} from "../geometry/rank-geometry.js";

/** A remote rank whose regions were brought into the order of the local ones. */
export interface AlignedRank {
  /** Regions as the local rank has them: those of `localRegions`, in order. */
  readonly geometry: RankGeometry;
  /** Local region of each. */
  readonly localRegions: readonly number[];
  /** Region in the rank's own list of each. */
  readonly remoteRegions: readonly number[];
}

/**
 * Pairs regions of both sides. Commonly they are the same list. A stage of a pipeline holds the regions of its own layers, and is matched
 * by name; a row that packs the pages of several layers becomes a region per page, where the local rank has one per layer. Errors:
 * `KV_PLAN_INCOMPATIBLE` naming what is missing. (vLLM 0.33: `_align_remote_regions_by_layer`, `_split_remote_packed_rows`, and the slices
 * of pipeline stages.)
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
        throw new KvError(
          "KV_PLAN_INVALID",
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
    regions.push(member === undefined ? { ...found, name: region.name } : pageOf(found, region, member));
  }
  const stages = Math.max(local.ppSize ?? 1, remote.ppSize ?? 1);
  const missing = local.regions.filter((_, index) => !localRegions.includes(index)).map(({ name }) => name);
  // A remote stage has some of the local layers; a remote that is not a stage has all of them.
  if (missing.length > 0 && ((remote.ppSize ?? 1) === 1 || regions.length === 0)) {
    throw incompatible(
      `the remote rank lacks caches of the local one${stages > 1 ? " (matched by name)" : ""}`,
      missing,
      remote.regions.map(({ name }) => name),
    );
  }
  return { geometry: { ...remote, regions }, localRegions, remoteRegions };
}

/** A page of each row, as a region of its own. */
function pageOf(row: RegionGeometry, local: RegionGeometry, member: PackedMember): RegionGeometry {
  const { offsetBytes, lengthBytes } = member;
  if (offsetBytes + lengthBytes > row.blockLengthBytes) {
    throw new KvError(
      "KV_PLAN_INVALID",
      `cache "${local.name}": ${lengthBytes} bytes at ${offsetBytes} leave the row of ${row.blockLengthBytes} bytes that packs it`,
    );
  }
  return {
    ...row,
    name: local.name,
    baseAddress: row.baseAddress + offsetBytes,
    blockLengthBytes: lengthBytes,
    // The row may be several groups'; its pages are each one's.
    groupId: local.groupId,
  };
}

/** By name, which is what differs. */
function sorted(members: Readonly<Record<string, PackedMember>>) {
  return Object.entries(members).sort();
}

/**
 * The local rank with the groups of its regions said. A stage of a pipeline tells of its own layers alone: where they are all of one group, that
 * the others have regions of their own shows on the other side only.
 */
export function withStageGroups(local: RankGeometry, remotes: readonly RankGeometry[]): RankGeometry {
  if ((local.ppSize ?? 1) === 1) return local;
  const named = new Set([local, ...remotes].flatMap(({ regions }) => regions.map(({ groupId }) => groupId)));
  if (named.size === 1) return local;
  const regions = local.regions.map((region) => {
    const { groupId, groupIds } = region;
    return groupIds !== undefined || groupId === SHARED_REGION ? region : { ...region, groupIds: [groupId] };
  });
  return { ...local, regions };
}
