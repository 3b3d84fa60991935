import { type BlockIds, KvError } from "@kv/interface";
import type { EngineTransferPlan } from "../engine/engine-plan-types.js";

/** Ids of one side are integers below `limit`, the blocks that every region of the group has. */
export function requireIds(
  group: number,
  side: "local" | "remote",
  ids: readonly number[],
  limit: number,
): void {
  for (const id of ids) {
    if (Number.isInteger(id) && id >= 0 && id < limit) continue;
    throw outOfRange(`group ${group}: ${side} block ${id} is not among the ${limit} blocks of its regions`, {
      group,
      side,
      block: id,
      limit,
    });
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

export function mismatch(message: string, details: Record<string, unknown>): KvError {
  return new KvError("KV_BLOCKS_MISMATCH", message, {
    hint: "say how many blocks a prefix hit supplies (localComputedBlocks) and how many tokens the remote holds (numTokens)",
    details,
  });
}
