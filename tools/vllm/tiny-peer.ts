import type { CompatibilityFactors } from "@kv/protocol";

/**
 * What both sides of the live tests share: the tiny Qwen3 of `make_tiny_model.py`, as `serve.sh`
 * serves it.
 */
export const TINY = {
  layers: 4,
  kvHeads: 4,
  headSize: 32,
  blockSize: 32,
  /** Bytes of K and V of one token in one head. */
  contentBytes: 2 * 32 * 4,
  layerName: (layer: number) => `model.layers.${layer}.self_attn.attn`,
} as const;

/** A vLLM of the live matrix: its version, and which of its two NIXL connectors it uses. */
export interface PeerKind {
  readonly version: keyof typeof CONNECTOR_VERSIONS;
  readonly mode: "pull" | "push";
}

const CONNECTOR_VERSIONS = { "0.31": 13, "0.32": 14, "0.33": 15 } as const;
export const CONNECTOR_NAMES = { pull: "NixlConnector", push: "NixlPushConnector" } as const;

/**
 * The factors of vLLM's compatibility hash, taken from the servers' settings. No value was copied
 * from a server's reply.
 */
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
