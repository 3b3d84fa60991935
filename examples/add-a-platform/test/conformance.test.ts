import { platformSuite } from "@kv/conformance/platform";
import type { KvCacheConfig } from "@kv/interface";
import { memoryTransport } from "@kv/transport-memory";
import { brickPlatform } from "../src/platform.js";

const config: KvCacheConfig = {
  groups: [{ kind: "full", layerNames: ["layers.0", "layers.1"] }],
  blockSize: 16,
  physicalBlocksPerLogical: 1,
  numKvHeads: 1,
  headSize: 2,
  numHiddenLayers: 2,
  dtype: "torch.float32",
  cacheDtype: "auto",
  layout: "LBHNC",
  attentionBackend: "BRICK",
};

platformSuite({
  name: "brick",
  create: brickPlatform,
  refusedSettings: [{ prefixCaching: true }],
  async staging() {
    const transport = memoryTransport();
    const regions = [0, 1].map((layer) => {
      const memory = transport.allocate(20 + 8 * 100);
      return {
        name: `layers.${layer}`,
        memory,
        memoryType: memory.memoryType,
        groupId: 0,
        offsetBytes: 20,
        numBlocks: 8,
        blockLengthBytes: 64,
        blockStrideBytes: 100,
      };
    });
    return { transport, caches: { config, regions }, close: () => transport.close() };
  },
});
