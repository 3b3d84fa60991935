import type { KvCacheConfig } from "@kv/interface";
import { memoryTransport } from "@kv/transport-memory";
import { type NeuronDevice, neuronCaches } from "../src/index.js";

export const CONFIG: KvCacheConfig = {
  groups: [{ kind: "full", layerNames: ["layers.0", "layers.1"] }],
  blockSize: 16,
  physicalBlocksPerLogical: 1,
  numKvHeads: 2,
  headSize: 8,
  numHiddenLayers: 2,
  dtype: "torch.bfloat16",
  cacheDtype: "auto",
  layout: "LBHNC",
  attentionBackend: "PLAIN",
};

/** What the platform suite stages, on a device. */
export async function stagingOn(device: NeuronDevice) {
  const transport = memoryTransport();
  const options = { device, config: CONFIG, numBlocks: 8, numHeads: CONFIG.numKvHeads };
  return {
    transport,
    caches: neuronCaches(options),
    wireNames: ["layers.0", "layers.1"],
    async close() {
      await transport.close();
      await device.close();
    },
  };
}
