import type { KvCacheConfig } from "@kv/interface";

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
