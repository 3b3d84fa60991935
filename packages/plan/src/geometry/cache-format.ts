/** How the bytes of a block are ordered, by the type of the cache. */
interface CacheFormat {
  /**
   * A block is heads × tokens × cells, in the order of the layout: it can be cut by head and by
   * token.
   */
  readonly inCells: boolean;
  /** Bytes of an element, where a cell has elements only. */
  readonly elementBytes?: number;
}

const CELLS: CacheFormat = { inCells: true };
const PAGE: CacheFormat = { inCells: false };
const elements = (elementBytes: number): CacheFormat => ({ inCells: true, elementBytes });

/**
 * The types of caches that plans know: names of elements, and vLLM 0.33's `--kv-cache-dtype`
 * (`CacheDType`; a test compares the two lists). Blocks of any other type are only moved whole.
 */
const FORMATS: ReadonlyMap<string, CacheFormat> = new Map([
  ["float32", elements(4)],
  ["float16", elements(2)],
  ["half", elements(2)],
  ["bfloat16", elements(2)],
  ["uint8", elements(1)],
  ["float8_e4m3fn", elements(1)],
  ["float8_e5m2", elements(1)],
  ["fp8", elements(1)],
  ["fp8_e4m3", elements(1)],
  ["fp8_e5m2", elements(1)],
  ["fp8_inc", elements(1)],
  // The type of the model's elements.
  ["auto", CELLS],
  // A slot per head and token, with its scales.
  ["turboquant_k8v4", CELLS],
  ["turboquant_4bit_nc", CELLS],
  ["turboquant_k3v4_nc", CELLS],
  ["turboquant_3bit_nc", CELLS],
  ["octave_k3v4", CELLS],
  ["octave_k3v3", CELLS],
  ["octave_k3v3_compact", CELLS],
  ["ultraquant_4bit", CELLS],
  ["int4_per_token_head", CELLS],
  ["int8_per_token_head", CELLS],
  ["fp8_per_token_head", CELLS],
  // The data of all heads, then the scales of all heads.
  ["nvfp4", PAGE],
  ["nvfp4_4over6", PAGE],
  // Latents with scales: in some models a block has all latents first, then all scales.
  ["fp8_ds_mla", PAGE],
  ["nvfp4_ds_mla", PAGE],
]);

/**
 * Attention backends whose blocks hold the K of all heads, then the V of all heads (vLLM 0.33:
 * `num_head_slots=2` in `customize_spec`).
 */
const BACKENDS_WITH_K_AND_V_APART: ReadonlySet<string> = new Set([
  "ROCM_ATTN",
  "ROCM_SEGMENTED_ATTN",
  "B12X",
]);

const formatOf = (cacheDtype: string) => FORMATS.get(cacheDtype.replace(/^torch\./, ""));

/**
 * Bytes of an element of a cache; `dtype` is the model's type, which "auto" stands for. Undefined
 * for types that pack elements with scales, and for unknown ones.
 */
export function cacheElementBytes(cacheDtype: string, dtype: string): number | undefined {
  return formatOf(cacheDtype === "auto" ? dtype : cacheDtype)?.elementBytes;
}

/**
 * Why blocks of a cache cannot be cut by head or by token, as a clause; undefined where they can.
 */
export function whyUncut(cacheDtype: string, attentionBackend: string): string | undefined {
  const format = formatOf(cacheDtype);
  if (format === undefined)
    return `cache dtype "${cacheDtype}" is not known to keep heads and tokens apart`;
  if (!format.inCells)
    return `blocks of cache dtype "${cacheDtype}" do not keep heads and tokens apart`;
  if (!BACKENDS_WITH_K_AND_V_APART.has(attentionBackend)) return undefined;
  return `blocks of ${attentionBackend} hold the K of all heads before the V of all heads`;
}
