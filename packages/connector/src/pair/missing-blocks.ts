import type { BlockIds, KvCacheConfig } from "@kv/interface";

/** Leaves out the blocks of the local prefix hit, which come first, and blocks beyond the tokens that arrive. */
export function missingBlocks(
  blockIds: BlockIds,
  numComputedTokens: number,
  numTokens: number,
  config: KvCacheConfig,
): { localBlockIds: BlockIds; localComputedBlocks: number[] } {
  const computed = Math.floor(numComputedTokens / config.blockSize);
  const end = Math.ceil(numTokens / config.blockSize);
  const clipped = blockIds.map((ids, group) => {
    const kind = config.groups[group]?.kind;
    return kind === "full" || kind === "mla" ? ids.slice(computed, end) : ids.slice(computed);
  });
  return { localBlockIds: clipped, localComputedBlocks: blockIds.map(() => computed) };
}
