import type { BlockIds, KvCacheConfig } from "@kv/interface";
import { exchangedBlocks } from "@kv/plan";

/** Leaves out the blocks of the local prefix hit, which come first, and what no peer hands over. */
export function missingBlocks(
  blockIds: BlockIds,
  numComputedTokens: number,
  numTokens: number,
  config: KvCacheConfig,
): { localBlockIds: BlockIds; localComputedBlocks: number[] } {
  const localComputedBlocks = blockIds.map((_, group) =>
    Math.floor(numComputedTokens / (config.groups[group]?.blockSize ?? config.blockSize)),
  );
  return {
    localBlockIds: exchangedBlocks(blockIds, config, { numTokens, computedBlocks: localComputedBlocks }),
    localComputedBlocks,
  };
}
