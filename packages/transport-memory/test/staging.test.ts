import { platformSuite } from "@kv/conformance/platform";
import {
  type KvCacheConfig,
  type KvCaches,
  KvError,
  type Platform,
  type StagingOptions,
} from "@kv/interface";
import { memoryTransport } from "@kv/transport-memory";

const NUM_BLOCKS = 8;
const BLOCK_BYTES = 512;
const config: KvCacheConfig = {
  groups: [{ kind: "full", layerNames: ["layers.0", "layers.1"] }],
  blockSize: 16,
  physicalBlocksPerLogical: 1,
  numKvHeads: 1,
  headSize: 4,
  numHiddenLayers: 2,
  dtype: "torch.float32",
  cacheDtype: "auto",
  layout: "LBHNC",
  attentionBackend: "STAGED",
};

/** A minimal platform with host staging, for a device whose memory cannot be registered. */
function stagedPlatform(): Platform {
  return {
    deviceType: "staged",
    capabilities: { registersAs: [], bufferDevices: ["cpu"], maxConcurrentBatches: 1 },
    kvCacheShape: ({ numBlocks, blockSize, numKvHeads, headSize }) => [
      2,
      numBlocks,
      blockSize,
      numKvHeads,
      headSize,
    ],
    maxModelLen({ max_position_embeddings: length }) {
      if (typeof length === "number" && length > 0) return length;
      throw new KvError("KV_CONFIG_INVALID", `max_position_embeddings is ${String(length)}`);
    },
    check({ prefixCaching }) {
      if (prefixCaching !== true) return [];
      throw new KvError("KV_PLATFORM_UNSUPPORTED", "prefixCaching cannot work on a staged device");
    },
    async createStaging({ transport, caches, poolBlocks }: StagingOptions) {
      const memories = caches.regions.map(({ blockLengthBytes }) =>
        transport.allocate(poolBlocks * blockLengthBytes),
      );
      const wireCaches: KvCaches = {
        config: caches.config,
        regions: caches.regions.map((region, index) => ({
          ...region,
          memory: memories[index] ?? region.memory,
          offsetBytes: 0,
          numBlocks: poolBlocks,
          blockStrideBytes: region.blockLengthBytes,
          memoryType: "DRAM",
        })),
      };
      const copy = async (
        [from, sources]: [KvCaches, readonly number[]],
        [to, targets]: [KvCaches, readonly number[]],
      ): Promise<void> => {
        for (const [index, source] of from.regions.entries()) {
          const target = to.regions[index];
          if (target === undefined) continue;
          const runs = (region: typeof source, ids: readonly number[]) => {
            if (ids.some((id) => id < 0 || id >= region.numBlocks))
              throw new KvError("KV_STAGING_FAILED", `one of the blocks ${ids} is out of range`);
            return Float64Array.from(
              ids.flatMap((id) => [
                region.offsetBytes + id * region.blockStrideBytes,
                region.blockLengthBytes,
              ]),
            );
          };
          await target.memory.scatter(
            runs(target, targets),
            await source.memory.gather(runs(source, sources)),
          );
        }
      };
      return {
        wireCaches,
        save: (_, { device, wire }) => copy([caches, device[0] ?? []], [wireCaches, wire[0] ?? []]),
        load: (_, { device, wire }) => copy([wireCaches, wire[0] ?? []], [caches, device[0] ?? []]),
        async close() {
          for (const memory of memories) memory.close();
        },
      };
    },
  };
}

platformSuite({
  name: "with host staging, on memory",
  create: stagedPlatform,
  refusedSettings: [{ prefixCaching: true }],
  async staging() {
    const transport = memoryTransport();
    // Blocks are padded, as on some devices.
    const strideBytes = BLOCK_BYTES + 64;
    const memories = [0, 1].map(() => transport.allocate(NUM_BLOCKS * strideBytes));
    const regions = memories.map((memory, index) => ({
      name: `layers.${index}`,
      memory,
      offsetBytes: 0,
      numBlocks: NUM_BLOCKS,
      blockLengthBytes: BLOCK_BYTES,
      blockStrideBytes: strideBytes,
      groupId: 0,
      memoryType: "DRAM" as const,
    }));
    return {
      transport,
      caches: { config, regions },
      async close() {
        await transport.close();
        for (const memory of memories) memory.close();
      },
    };
  },
});
