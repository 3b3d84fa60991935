import { KvError, type Platform } from "@kv/interface";

/** Host memory. It is registered directly, needs no staging, and accepts all settings. The cache shape is vLLM's for CPUs, with K and V packed in the last dimension. */
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
    maxModelLen(modelConfig) {
      const value = modelConfig["max_position_embeddings"];
      if (typeof value === "number" && Number.isInteger(value) && value > 0) return value;
      throw new KvError(
        "KV_CONFIG_INVALID",
        `the model's config gives max_position_embeddings ${JSON.stringify(value) ?? "missing"}, not a positive integer`,
      );
    },
    check: () => [],
  };
}
