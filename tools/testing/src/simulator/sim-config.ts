import type { KvCacheConfig, KvCacheKind } from "@kv/interface";

export function simConfig(
  blockSize: number,
  numKvHeads = 4,
  numLayers = 2,
  kind: KvCacheKind = "full",
): KvCacheConfig {
  const layerNames = Array.from({ length: numLayers }, (_, layer) => `layers.${layer}`);
  return {
    groups: [{ kind, layerNames }],
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
