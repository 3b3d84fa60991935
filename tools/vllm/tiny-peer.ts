import type { CompatibilityFactors } from "@kv/protocol";

/** The tiny Qwen3 of `make_tiny_model.py`, as `serve.sh` serves it. */
export const TINY = {
  layers: 4,
  kvHeads: 4,
  headSize: 32,
  blockSize: 32,
  /** K and V of one token in one head. */
  contentBytes: 2 * 32 * 4,
  layerName: (layer: number) => `model.layers.${layer}.self_attn.attn`,
} as const;

export interface PeerKind {
  readonly version: keyof typeof CONNECTOR_VERSIONS;
  readonly mode: "pull" | "push";
}

const CONNECTOR_VERSIONS = { "0.31": 13, "0.32": 14, "0.33": 15 } as const;
export const CONNECTOR_NAMES = { pull: "NixlConnector", push: "NixlPushConnector" } as const;

/** Of vLLM's compatibility hash, by the servers' settings. None was copied from a reply. */
export function factorsOf({ version, mode }: PeerKind) {
  return {
    vllm_version: `${version}.0`,
    nixl_connector_version: CONNECTOR_VERSIONS[version],
    model: "tiny-qwen3",
    dtype: "torch.float32",
    num_kv_heads: TINY.kvHeads,
    head_size: TINY.headSize,
    num_hidden_layers: TINY.layers,
    attn_backend_name: "CPU_ATTN",
    cache_dtype: "auto",
    is_hma_enabled: true,
    speculative_config: null,
    transfer_mode: mode,
  } satisfies CompatibilityFactors;
}

export function prompt(length: number): number[] {
  return Array.from({ length }, (_, i) => ((7 * i * i + 3 * i + 11) % 1000) + 10);
}
