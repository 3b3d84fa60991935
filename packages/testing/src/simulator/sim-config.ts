import type { KvCacheConfig } from "@kv/interface";

/** Cache config of a simulated engine. All layers use full attention. */
export function simConfig(blockSize: number, numKvHeads = 4, numLayers = 2): KvCacheConfig {
  const layerNames = Array.from({ length: numLayers }, (_, layer) => `layers.${layer}`);
  return {
    groups: [{ kind: "full", layerNames }],
    blockSize,
    physicalBlocksPerLogical: 1,
    numKvHeads,
    headSize: 2,
    numHiddenLayers: numLayers,
    dtype: "torch.float32",
    cacheDtype: "auto",
    layout: "LBHNC",
    attentionBackend: "SIM",
  };
}
