import { KvError } from "@kv/interface";
import type { ModelGeometry, RankGeometry } from "../geometry/rank-geometry.js";
import { joinsGroups } from "../kinds/registry.js";
import type { RequestBlocks } from "../request/request-blocks.js";

/**
 * Two engines that group a model's layers differently, in joint groups: one for each local and
 * remote group with a common region. Build the plan from `local`, `remotes` and `model`, and give
 * `planRequest` the result of `blocks`.
 */
export interface JointGroups {
  readonly local: RankGeometry;
  readonly remotes: readonly RankGeometry[];
  readonly model: ModelGeometry;
  readonly pairs: readonly (readonly [local: number, remote: number])[];
  /**
   * Converts a request's lists to joint groups.
   * @throws `KV_BLOCKS_MISMATCH` for the wrong number of lists.
   */
  blocks(blocks: RequestBlocks): RequestBlocks;
}

/**
 * Returns the joint groups of a pair, as vLLM 0.33 for pure MLA models (`_block_ids_by_region`).
 * Undefined where both sides group alike, or regions do not identify their groups;
 * `buildEngineTransferPlan` refuses the latter.
 */
export function joinGroups({
  local,
  remotes,
  ...model
}: ModelGeometry & {
  readonly local: RankGeometry;
  readonly remotes: readonly RankGeometry[];
}): JointGroups | undefined {
  if (!joinsGroups(model.groups)) return undefined;
  const theirs = new Map<string, number>();
  for (const rank of remotes)
    for (const { name, groupId } of rank.regions) theirs.set(name, groupId);
  const remoteGroups = Math.max(...theirs.values()) + 1;
  const sides = [local, ...remotes];
  if (local.regions.every(({ name, groupId }) => theirs.get(name) === groupId)) return undefined;
  if (
    sides.some(
      (rank) =>
        rank.packedMembers !== undefined ||
        rank.regions.some(({ groupIds }) => groupIds !== undefined),
    )
  )
    return undefined;
  const mine = local.regions.map(({ groupId }) => groupId);
  if (!areConfined(mine, model.groups.length) || !areConfined([...theirs.values()], remoteGroups))
    return undefined;

  const found = new Map<string, readonly [local: number, remote: number]>();
  for (const { name, groupId } of local.regions) {
    const remote = theirs.get(name);
    if (remote === undefined) return undefined;
    found.set(`${groupId} ${remote}`, [groupId, remote]);
  }
  const pairs = [...found.values()].sort(([a, b], [c, d]) => a - c || b - d);
  const jointOf = new Map(
    local.regions.map(({ name, groupId }) => [
      name,
      pairs.findIndex(([one, other]) => one === groupId && other === theirs.get(name)),
    ]),
  );
  const regrouped = (
    { groupBlockTokens: tokens, ...rank }: RankGeometry,
    which: 0 | 1,
  ): RankGeometry => ({
    ...rank,
    regions: rank.regions.map((region) => ({
      ...region,
      groupId: jointOf.get(region.name) ?? region.groupId,
    })),
    groupBlockTokens: tokens && pairs.map((pair) => tokens[pair[which]] as number),
  });
  return {
    local: regrouped(local, 0),
    remotes: remotes.map((rank) => regrouped(rank, 1)),
    model: { ...model, groups: pairs.map(([group]) => model.groups[group] ?? "") },
    pairs,
    blocks(given) {
      if (given.localBlockIds.every((ids) => ids.length === 0)) return given;
      requireLists("local", given.localBlockIds, model.groups.length);
      requireLists("remote", given.remoteBlockIds, remoteGroups);
      const { localComputedBlocks: computed } = given;
      return {
        ...given,
        localBlockIds: pairs.map(([group]) => given.localBlockIds[group] as readonly number[]),
        remoteBlockIds: pairs.map(([, group]) => given.remoteBlockIds[group] as readonly number[]),
        localComputedBlocks: computed && pairs.map(([group]) => computed[group] ?? 0),
      };
    },
  };
}

/** Whether each list of blocks belongs to regions of its own. */
function areConfined(groupIds: readonly number[], numGroups: number): boolean {
  return (
    groupIds.every((group) => Number.isSafeInteger(group) && group >= 0) &&
    new Set(groupIds).size === numGroups
  );
}

function requireLists(side: string, lists: readonly unknown[], numGroups: number): void {
  if (lists.length === numGroups) return;
  throw new KvError(
    "KV_BLOCKS_MISMATCH",
    `${side} block ids of ${lists.length} KV cache groups are given, the regions of that side have ${numGroups} groups`,
    { details: { side, given: lists.length, groups: numGroups } },
  );
}
