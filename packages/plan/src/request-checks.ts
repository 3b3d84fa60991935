import { type BlockIds, KvError } from "@kv/interface";
import type { EngineTransferPlan } from "./engine-plan-types.js";

export function requireIds(
  plan: EngineTransferPlan,
  group: number,
  localIds: readonly number[],
  remoteIds: readonly number[],
): void {
  const sides = [
    ["local", plan.local, localIds],
    ["remote", plan.remote, remoteIds],
  ] as const;
  for (const [side, rank, ids] of sides) {
    let fewest = Number.POSITIVE_INFINITY;
    for (const region of plan.regionsOfGroup[group] ?? [])
      fewest = Math.min(fewest, rank.regions[region]?.numBlocks ?? 0);
    const limit = Math.floor(fewest / rank.physicalBlocksPerLogical);
    for (const id of ids) {
      if (Number.isInteger(id) && id >= 0 && id < limit) continue;
      throw outOfRange(
        `group ${group}: ${side} block ${id} is not among the ${limit} blocks of its regions`,
        {
          group,
          side,
          block: id,
          limit,
        },
      );
    }
  }
}

export function requireGroups(plan: EngineTransferPlan, side: string, ids: BlockIds): void {
  if (ids.length === plan.groups.length) return;
  throw new KvError(
    "KV_BLOCKS_MISMATCH",
    `${side} block ids of ${ids.length} KV cache groups given, the engine has ${plan.groups.length}`,
    { details: { side, given: ids.length, groups: plan.groups.length } },
  );
}

export function requireCount(name: string, value: number, minimum: number): void {
  if (Number.isSafeInteger(value) && value >= minimum) return;
  throw new KvError("KV_BLOCKS_MISMATCH", `${name} is ${value}, expected an integer of at least ${minimum}`, {
    details: { name, value },
  });
}

export function outOfRange(message: string, details: Record<string, unknown>): KvError {
  return new KvError("KV_BLOCKS_OUT_OF_RANGE", message, { details });
}
