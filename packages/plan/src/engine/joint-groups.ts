import { KvError } from "@kv/interface";
import type { ModelGeometry, RankGeometry } from "../geometry/rank-geometry.js";
import { cacheKind } from "../kinds/registry.js";
import type { RequestBlocks } from "../request/request-checks.js";

/**
 * Two engines that group the layers of a model differently, described in joint groups: one for each
 * pair of a local and a remote group that some region belongs to. Build the plan from `local`,
 * `remotes` and `model`, and give `planRequest` the lists of `blocks`.
 */
export interface JointGroups {
  /** The local rank in joint groups. */
  readonly local: RankGeometry;
  /** The remote ranks in joint groups. */
  readonly remotes: readonly RankGeometry[];
  /** The model in joint groups. */
  readonly model: ModelGeometry;
  /** The local and the remote group of each joint group. */
  readonly pairs: readonly (readonly [local: number, remote: number])[];
  /**
   * Converts the lists of a request from each side's own groups to joint groups.
   * @throws `KV_BLOCKS_MISMATCH` for the wrong number of lists.
   */
  blocks(blocks: RequestBlocks): RequestBlocks;
}

/**
 * The joint groups of a pair. Undefined where both sides group their regions alike, and where
 * regions do not identify their groups; in the latter case `buildEngineTransferPlan` refuses the
 * pair. As vLLM 0.33 for pure MLA models (`_block_ids_by_region`), whose groups have no heads to
 * distribute.
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

  const pairs: [number, number][] = [];
  for (const { name, groupId } of local.regions) {
    const remote = theirs.get(name);
    if (remote === undefined) return undefined;
    if (!pairs.some(([one, other]) => one === groupId && other === remote))
      pairs.push([groupId, remote]);
  }
  pairs.sort(([a, b], [c, d]) => a - c || b - d);
  const jointOf = new Map<string, number>();
  for (const { name, groupId } of local.regions) {
    const remote = theirs.get(name);
    jointOf.set(
      name,
      pairs.findIndex(([one, other]) => one === groupId && other === remote),
    );
  }
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
        ...(computed === undefined
          ? {}
          : { localComputedBlocks: pairs.map(([group]) => computed[group] ?? 0) }),
      };
    },
  };
}

/**
 * Whether the two engines may group a model's layers differently: every group holds tokens, and is
 * the same on every rank.
 *
 * @throws `KV_PLAN_INVALID` for an unknown kind.
 */
export function joinsGroups(groups: ModelGeometry["groups"]): boolean {
  return groups.every((name) => {
    const { sharding, extent } = cacheKind(name);
    return sharding === "replicated" && extent !== "whole";
  });
}

/**
 * Whether each group has regions of its own, so that every list of blocks belongs to certain
 * regions.
 */
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
