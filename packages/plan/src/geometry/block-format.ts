import type { KvCacheLayout } from "@kv/interface";

/**
 * Order of heads and tokens within a local block. `opaque`: unknown, so no part of a block is moved
 * or zeroed.
 */
export type BlockOrder = "head-major" | "token-major" | "opaque";

/**
 * vLLM's CPU kernels pack tokens for their instructions. CPU_ATTN has one layout, LBHNC (vLLM 0.33,
 * `supported_kv_cache_layouts`), so a plan with "hnd-to-nhd" is refused.
 */
const BACKENDS_WITH_OWN_TOKEN_ORDER: ReadonlySet<string> = new Set(["CPU_ATTN"]);

/**
 * Their blocks hold the K of all heads, then the V of all heads (vLLM 0.33: `num_head_slots=2` in
 * `customize_spec`).
 */
const BACKENDS_WITH_K_AND_V_APART: ReadonlySet<string> = new Set([
  "ROCM_ATTN",
  "ROCM_SEGMENTED_ATTN",
  "B12X",
]);

/**
 * Element bytes of cache types without scales: element names, and vLLM 0.33's `--kv-cache-dtype`
 * (`CacheDType`, which a test compares with these lists). Types on no list only move whole.
 */
const ELEMENT_BYTES: ReadonlyMap<string, number> = new Map([
  ["float32", 4],
  ["float16", 2],
  ["half", 2],
  ["bfloat16", 2],
  ["uint8", 1],
  ["float8_e4m3fn", 1],
  ["float8_e5m2", 1],
  ["fp8", 1],
  ["fp8_e4m3", 1],
  ["fp8_e5m2", 1],
  ["fp8_inc", 1],
]);

/** Other types whose blocks are heads × tokens × cells. */
const IN_CELLS: ReadonlySet<string> = new Set([
  "auto",
  // A slot for each head and token, with its scales.
  "turboquant_k8v4",
  "turboquant_4bit_nc",
  "turboquant_k3v4_nc",
  "turboquant_3bit_nc",
  "octave_k3v4",
  "octave_k3v3",
  "octave_k3v3_compact",
  "ultraquant_4bit",
  "int4_per_token_head",
  "int8_per_token_head",
  "fp8_per_token_head",
]);

const NOT_IN_CELLS: ReadonlySet<string> = new Set([
  // The data of all heads, then the scales of all heads.
  "nvfp4",
  "nvfp4_4over6",
  // In some models a block has all latents first, then all scales.
  "fp8_ds_mla",
  "nvfp4_ds_mla",
]);

/** Two layouts spread a layer's block over memory. */
export function orderOfLayout(layout: KvCacheLayout): BlockOrder {
  if (layout.includes("HN")) return "head-major";
  return layout.includes("NH") ? "token-major" : "opaque";
}

/** As `orderOfLayout`, but a single head lies together in every layout. */
export function orderOfBlock(layout: KvCacheLayout, heads: number): BlockOrder {
  const order = orderOfLayout(layout);
  return heads === 1 && order === "opaque" ? "head-major" : order;
}

/** Whether tokens within a head are in the order of their positions on all sides. */
export function hasPlainTokens(
  ...sides: readonly { readonly attentionBackend: string }[]
): boolean {
  return !sides.some(({ attentionBackend }) => BACKENDS_WITH_OWN_TOKEN_ORDER.has(attentionBackend));
}

const withoutTorch = (dtype: string) => dtype.replace(/^torch\./, "");

/**
 * Bytes of a cache's element; "auto" stands for `dtype`. Undefined for unknown types and types with
 * scales.
 */
export function cacheElementBytes(cacheDtype: string, dtype: string): number | undefined {
  return ELEMENT_BYTES.get(withoutTorch(cacheDtype === "auto" ? dtype : cacheDtype));
}

/** Returns a clause; undefined where blocks can be cut by head or token. */
export function whyUncut(cacheDtype: string, attentionBackend: string): string | undefined {
  const name = withoutTorch(cacheDtype);
  if (NOT_IN_CELLS.has(name))
    return `blocks of cache dtype "${cacheDtype}" do not keep heads and tokens apart`;
  if (!ELEMENT_BYTES.has(name) && !IN_CELLS.has(name))
    return `cache dtype "${cacheDtype}" is not known to keep heads and tokens apart`;
  if (!BACKENDS_WITH_K_AND_V_APART.has(attentionBackend)) return undefined;
  return `blocks of ${attentionBackend} hold the K of all heads before the V of all heads`;
}
