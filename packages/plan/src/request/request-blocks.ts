import { type BlockIds, type KvCacheConfig, KvError } from "@kv/interface";
import type { EngineTransferPlan } from "../engine/engine-plan.js";
import { cacheKind } from "../kinds/registry.js";

/** The blocks of one request: logical block ids by KV cache group. */
export interface RequestBlocks {
  /**
   * Blocks to fill, without those of a prefix hit. Empty lists are a full hit, which is only
   * notified.
   */
  readonly localBlockIds: BlockIds;
  /** The remote's blocks of the whole request, its prefix included. */
  readonly remoteBlockIds: BlockIds;
  /**
   * Tokens in the remote's blocks (vLLM: `remote_num_tokens`). Local tokens beyond are uncovered.
   */
  readonly numTokens?: number | undefined;
  /**
   * By group: logical blocks of a prefix hit before `localBlockIds`. Absent: lists are aligned at
   * their ends, as in vLLM, and refused where that is a guess.
   */
  readonly localComputedBlocks?: readonly number[] | undefined;
}

/** Options of `exchangedBlocks`. */
export interface ExchangeOptions {
  readonly numTokens: number;
  /** By group: blocks to leave out at the start, such as a prefix hit. @default none */
  readonly computedBlocks?: readonly number[] | undefined;
  /** @default 1 */
  readonly dcpSize?: number | undefined;
}

/** Returns the tokens in a logical block of each group, by which to cut lists. */
export function groupBlockTokens({
  groups,
  blockSize,
}: Pick<KvCacheConfig, "groups" | "blockSize">): readonly number[] {
  return groups.map((group) => group.blockSize ?? blockSize);
}

/**
 * Returns the blocks of a request that one side sends to the other (vLLM 0.33,
 * `get_exchange_clipped_blocks`): those with its tokens; of a sliding window those that the last
 * token's window reaches, of a state the one after the last token. `blockIds` are by group, then by
 * position in the sequence.
 *
 * @throws `KV_PLAN_INVALID` for an unknown kind of cache.
 */
export function exchangedBlocks(
  blockIds: BlockIds,
  config: Pick<KvCacheConfig, "groups" | "blockSize">,
  { numTokens, computedBlocks, dcpSize = 1 }: ExchangeOptions,
): BlockIds {
  return blockIds.map((ids, index) => {
    const group = config.groups[index];
    if (group === undefined) return ids;
    const { extent } = cacheKind(group.kind);
    if (extent === "whole") return ids;
    if (extent === "state") {
      // The running state stays, even before blocks for speculation are allocated.
      const scratch = Math.min(group.speculativeBlocks ?? 0, Math.max(0, ids.length - 1));
      return ids.slice(0, ids.length - scratch).slice(-1);
    }
    const blockTokens = group.blockSize ?? config.blockSize;
    const end = Math.ceil(numTokens / (blockTokens * dcpSize));
    const held = ids.slice(computedBlocks?.[index] ?? 0, end);
    const { slidingWindowTokens } = group;
    if (extent !== "window" || slidingWindowTokens === undefined) return held;
    // One block more than the window's length, which need not begin with a block.
    return held.slice(-(Math.ceil(slidingWindowTokens / blockTokens) + 1));
  });
}

export function requireIds(
  group: number,
  side: "local" | "remote",
  ids: readonly number[],
  limit: number,
): void {
  for (const block of ids) {
    if (Number.isInteger(block) && block >= 0 && block < limit) continue;
    throw outOfRange(
      `group ${group}: ${side} block ${block} is not among the ${limit} blocks of its regions`,
      { group, side, block, limit },
    );
  }
}

export function requireGroups(plan: EngineTransferPlan, side: string, ids: BlockIds): void {
  if (ids.length === plan.groups.length) return;
  throw new KvError(
    "KV_BLOCKS_MISMATCH",
    `${side} block ids of ${ids.length} KV cache groups are given, the engine has ${plan.groups.length}`,
    { details: { side, given: ids.length, groups: plan.groups.length } },
  );
}

export function requireCount(name: string, value: number, minimum: number): void {
  if (Number.isSafeInteger(value) && value >= minimum) return;
  throw new KvError(
    "KV_BLOCKS_MISMATCH",
    `${name} is ${value}, expected an integer of at least ${minimum}`,
    { details: { name, value } },
  );
}

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
