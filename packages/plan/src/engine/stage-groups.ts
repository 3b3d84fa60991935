import { type RankGeometry, SHARED_REGION } from "../geometry/rank-geometry.js";

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
