import { type KvCaches, KvError } from "@kv/interface";

/** Blocks of a staging pool of `poolLengthBytes` for a rank with these caches. Errors: `KV_STAGING_FAILED` for less than two blocks. */
export function stagingPoolBlocks(caches: KvCaches, poolLengthBytes: number): number {
  const blockLengthBytes = caches.regions.reduce((sum, region) => sum + region.blockLengthBytes, 0);
  const blocks = Math.floor(poolLengthBytes / blockLengthBytes);
  if (blocks >= 2) return blocks;
  throw new KvError(
    "KV_STAGING_FAILED",
    `a staging pool of ${poolLengthBytes} bytes holds ${blocks} blocks of ${blockLengthBytes} bytes over all layers; it needs two`,
    { hint: "give the pool more host memory" },
  );
}
