import type { KvCacheConfig } from "@kv/interface";

/** The cache of a simulated engine: two layers of full attention. */
export function simConfig(blockSize: number, numKvHeads = 4): KvCacheConfig {
  return {
    groups: [{ kind: "full", layerNames: ["layers.0", "layers.1"] }],
    blockSize,
    physicalBlocksPerLogical: 1,
    numKvHeads,
    headSize: 2,
    numHiddenLayers: 2,
    dtype: "torch.float32",
    cacheDtype: "auto",
    layout: "LBHNC",
    attentionBackend: "SIM",
  };
}
