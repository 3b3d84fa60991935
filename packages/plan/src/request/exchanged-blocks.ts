import type { BlockIds, KvCacheConfig } from "@kv/interface";
import { cacheKind } from "../kinds/registry.js";

/**
 * Tokens in a logical block of each KV cache group. Cut lists of blocks by these, not by the
 * `blockSize` of the whole cache.
 */
export function groupBlockTokens({
  groups,
  blockSize,
}: Pick<KvCacheConfig, "groups" | "blockSize">): readonly number[] {
  return groups.map((group) => group.blockSize ?? blockSize);
}

/**
 * The blocks of a request that one side sends to the other (vLLM 0.33,
 * `get_exchange_clipped_blocks`): those with tokens of the request, without a block for the token
 * that is sampled next. Of a sliding window: the blocks that the window of the last token reaches.
 * Of a state: the block after the last token. `blockIds` are the request's block tables per group,
 * by position in the sequence.
 *
 * @throws `KV_PLAN_INVALID` for an unknown kind of cache.
 */
export function exchangedBlocks(
  blockIds: BlockIds,
  config: Pick<KvCacheConfig, "groups" | "blockSize">,
  { numTokens, computedBlocks, dcpSize = 1 }: ExchangeOptions,
): BlockIds {
  const tokens = groupBlockTokens(config);
  return blockIds.map((ids, index) => {
    const group = config.groups[index];
    if (group === undefined) return ids;
    const { extent } = cacheKind(group.kind);
    if (extent === "whole") return ids;
    if (extent === "state") {
      // The running state stays in the list, also before the blocks for speculation are allocated.
      const scratch = Math.min(group.speculativeBlocks ?? 0, Math.max(0, ids.length - 1));
      return ids.slice(0, ids.length - scratch).slice(-1);
    }
    const blockTokens = tokens[index] ?? config.blockSize;
    const held = ids.slice(
      computedBlocks?.[index] ?? 0,
      Math.ceil(numTokens / (blockTokens * dcpSize)),
    );
    const { slidingWindowTokens } = group;
    if (extent !== "window" || slidingWindowTokens === undefined) return held;
    // One block more than the window's length: the window need not begin with a block.
    return held.slice(-(Math.ceil(slidingWindowTokens / blockTokens) + 1));
  });
}

/** Options of `exchangedBlocks`. */
export interface ExchangeOptions {
  /** Tokens of the request. */
  readonly numTokens: number;
  /** Per group: blocks at the begin to leave out, such as those of a prefix hit. @default none */
  readonly computedBlocks?: readonly number[] | undefined;
  /** Ranks that share the sequence by decode context parallelism. @default 1 */
  readonly dcpSize?: number | undefined;
}
