import { type BlockIds, KvError } from "@kv/interface";
import type { EngineTransferPlan } from "../engine/engine-plan.js";

/** The blocks of one request: logical block ids, per KV cache group. */
export interface RequestBlocks {
  /**
   * Local blocks to fill, without those of a local prefix hit. Empty lists mean a full hit, which
   * is only notified.
   */
  readonly localBlockIds: BlockIds;
  /** The remote's blocks of the whole request, its prefix included. */
  readonly remoteBlockIds: BlockIds;
  /**
   * Tokens that the remote's blocks hold (vLLM: `remote_num_tokens`). Local tokens beyond it are
   * uncovered.
   */
  readonly numTokens?: number | undefined;
  /**
   * Logical local blocks per group that a prefix hit supplies, before the first of `localBlockIds`.
   * Without it the two lists are aligned at their ends, as vLLM does. A request whose alignment
   * would be a guess is refused.
   */
  readonly localComputedBlocks?: readonly number[] | undefined;
}

/**
 * Refuses block ids that are not integers below `limit`, the number of blocks in the group's
 * smallest region.
 *
 * @throws `KV_BLOCKS_OUT_OF_RANGE`.
 */
export function requireIds(
  group: number,
  side: "local" | "remote",
  ids: readonly number[],
  limit: number,
): void {
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

/**
 * Refuses lists for another number of groups than the plan has.
 *
 * @throws `KV_BLOCKS_MISMATCH`.
 */
export function requireGroups(plan: EngineTransferPlan, side: string, ids: BlockIds): void {
  if (ids.length === plan.groups.length) return;
  throw new KvError(
    "KV_BLOCKS_MISMATCH",
    `${side} block ids of ${ids.length} KV cache groups are given, the engine has ${plan.groups.length}`,
    { details: { side, given: ids.length, groups: plan.groups.length } },
  );
}

/**
 * Refuses a number that is not an integer of at least `minimum`.
 *
 * @throws `KV_BLOCKS_MISMATCH`.
 */
export function requireCount(name: string, value: number, minimum: number): void {
  if (Number.isSafeInteger(value) && value >= minimum) return;
  throw new KvError(
    "KV_BLOCKS_MISMATCH",
    `${name} is ${value}, expected an integer of at least ${minimum}`,
    {
      details: { name, value },
    },
  );
}

/** `KV_BLOCKS_OUT_OF_RANGE`. */
export function outOfRange(message: string, details: Record<string, unknown>): KvError {
  return new KvError("KV_BLOCKS_OUT_OF_RANGE", message, { details });
}

/** `KV_BLOCKS_MISMATCH`, with the hint that resolves most of them. */
export function mismatch(message: string, details: Record<string, unknown>): KvError {
  return new KvError("KV_BLOCKS_MISMATCH", message, {
    hint: "give the number of blocks that a prefix hit supplies (localComputedBlocks) and the number of tokens that the remote holds (numTokens)",
    details,
  });
}
