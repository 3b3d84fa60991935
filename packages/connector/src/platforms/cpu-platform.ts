import { type Platform, readMaxModelLen } from "@kv/interface";

/**
 * Host memory. It is registered directly, needs no staging, and accepts all settings. The cache
 * shape is vLLM's for CPUs, with K and V packed in the last dimension.
 */
export function cpuPlatform(): Platform {
  return {
    deviceType: "cpu",
    capabilities: { registersAs: ["DRAM"], bufferDevices: ["cpu"], maxConcurrentBatches: 2 },
    kvCacheShape: ({ numBlocks, numKvHeads, blockSize, headSize }) => [
      numBlocks,
      numKvHeads,
      blockSize,
      2 * headSize,
    ],
    maxModelLen: readMaxModelLen,
    check: () => [],
  };
}
