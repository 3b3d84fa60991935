import type { BlockIds, KvCacheConfig } from "@kv/interface";
import { cacheKind } from "../kinds/registry.js";

/**
 * What of a request's block tables is handed over, on either side (vLLM 0.33, `get_exchange_clipped_blocks`): blocks that hold tokens of
 * the request, without one for the token that is sampled next; of a sliding window those that its end can see; of state the one after the
 * last token. Tables are by position in the sequence. `computedBlocks`: per group, blocks at the begin that are not wanted.
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
      // At least the running state stays, also before scratch is allocated.
      const scratch = Math.min(group.speculativeBlocks ?? 0, Math.max(0, ids.length - 1));
      return ids.slice(0, ids.length - scratch).slice(-1);
    }
    const blockTokens = group.blockSize ?? config.blockSize;
    const held = ids.slice(computedBlocks?.[index] ?? 0, Math.ceil(numTokens / (blockTokens * dcpSize)));
    const { slidingWindowTokens } = group;
    if (extent !== "window" || slidingWindowTokens === undefined) return held;
    // One more than the window's length: it need not begin with a block.
    return held.slice(-(Math.ceil(slidingWindowTokens / blockTokens) + 1));
  });
}

export interface ExchangeOptions {
  readonly numTokens: number;
  readonly computedBlocks?: readonly number[];
  readonly dcpSize?: number;
}
