import { KvError } from "@kv/interface";
import { z } from "zod";
import { COMPRESSED_BLOCK_TOKENS, compressedLayers, indexerBytes } from "./compressed-layers.js";
import type { LayerShape, ModelShape, StateShape } from "./model-shape.js";
import { mamba2State } from "./state-pages.js";

/** Bytes of an element by the names that configs and flags use. */
const BYTES_OF_DTYPE: Readonly<Record<string, number>> = {
  float32: 4,
  bfloat16: 2,
  float16: 2,
  half: 2,
  fp8: 1,
  fp8_e4m3: 1,
  fp8_e5m2: 1,
};

/** Bytes of the K, or the V, of one head and token in types that pack elements with their scales (vLLM 0.33: `nvfp4_kv_cache_full_dim`, `TritonAttentionBackend`). */
const PACKED_ROW_BYTES: Readonly<Record<string, (headSize: number) => number>> = {
  nvfp4: (headSize) => Math.floor(headSize / 2) + Math.floor(headSize / 16),
  nvfp4_4over6: (headSize) => Math.floor(headSize / 2) + Math.floor(headSize / 16),
  fp8_per_token_head: (headSize) => headSize + 4,
  int8_per_token_head: (headSize) => headSize + 4,
  int4_per_token_head: (headSize) => Math.floor(headSize / 2) + 4,
};

/** Latents with their scales, as the packed FP8 layouts of sparse MLA have them (vLLM 0.33: "fp8_ds_mla"). */
const PACKED_LATENTS = "fp8_ds_mla";
const PACKED_LATENT_BYTES = { "DeepSeek V3.2": 656, "DeepSeek V4": 584 } as const;

const count = z.int().min(1).max(1_000_000);
/** The fields that decide a cache, of any architecture. All others are ignored. */
const text = z.looseObject({
  architectures: z.array(z.string().max(200)).max(16).optional(),
  model_type: z.string().max(200).optional(),
  num_hidden_layers: count.max(10_000).optional(),
  num_attention_heads: count.optional(),
  num_key_value_heads: count.nullish(),
  num_global_key_value_heads: count.nullish(),
  hidden_size: count.optional(),
  head_dim: count.nullish(),
  global_head_dim: count.nullish(),
  kv_lora_rank: count.nullish(),
  qk_rope_head_dim: z.int().min(0).max(65_536).nullish(),
  index_head_dim: count.nullish(),
  compress_ratios: z.array(z.number()).max(10_000).nullish(),
  sliding_window: count.max(2 ** 31).nullish(),
  use_sliding_window: z.boolean().nullish(),
  sliding_window_pattern: count.nullish(),
  layer_types: z.array(z.string().max(100)).max(10_000).nullish(),
  hybrid_override_pattern: z.string().max(10_000).nullish(),
  mamba_num_heads: count.nullish(),
  mamba_head_dim: count.nullish(),
  ssm_state_size: count.nullish(),
  n_groups: count.nullish(),
  conv_kernel: z.int().min(2).max(1000).nullish(),
  mamba_ssm_cache_dtype: z.string().max(100).nullish(),
  torch_dtype: z.string().max(100).nullish(),
  dtype: z.string().max(100).nullish(),
});
const config = text.extend({ text_config: text.nullish() });

type TextConfig = z.infer<typeof text>;

/** Types of cache elements. */
export interface CacheDtypes {
  /** vLLM's `--kv-cache-dtype`. Default "auto": the model's type. */
  readonly cache?: string | undefined;
  /** vLLM's `--mamba-ssm-cache-dtype`. Default "auto": the type in the config, otherwise float32. */
  readonly state?: string | undefined;
}

/**
 * Reads the shape of a model's KV cache from a Hugging Face `config.json`. Errors: `KV_CONFIG_INVALID` with the field, `KV_PLAN_UNSUPPORTED` for a cache of
 * unknown layout.
 */
export function modelFromHfConfig(
  name: string,
  value: unknown,
  { cache: cacheDtype = "auto", state: stateDtype = "auto" }: CacheDtypes = {},
): ModelShape {
  const parsed = config.safeParse(value);
  if (!parsed.success) {
    const [issue] = parsed.error.issues;
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${name}: ${issue?.path.join(".") || "the file"}: ${issue?.message}`,
      {
        hint: "give the config.json of a decoder model from Hugging Face",
      },
    );
  }
  const outer = parsed.data;
  const inner = outer.text_config ?? outer;
  const assumed: string[] = [];
  const layers = required(name, "num_hidden_layers", inner.num_hidden_layers);
  const modelDtype = dtypeOf(name, outer, inner, assumed);
  const dtype = cacheDtype === "auto" ? modelDtype : cacheDtype;
  const latents = () => ({ layers, elementBytes: bytesOf(name, dtype, "--kv-cache-dtype"), assumed });
  if (inner.compress_ratios != null) return compressedModel(name, inner, latents());
  if (inner.kv_lora_rank != null) return latentModel(name, inner, latents());
  const heads = required(name, "num_attention_heads", inner.num_attention_heads);
  if (inner.num_key_value_heads == null)
    assumed.push(`num_key_value_heads is missing: as many as attention heads, ${heads}`);
  const numKvHeads = inner.num_key_value_heads ?? heads;
  if (inner.head_dim == null) assumed.push("head_dim is missing: hidden_size / num_attention_heads");
  const headSize = inner.head_dim ?? required(name, "hidden_size", inner.hidden_size) / heads;
  const windowed = windowedLayers(layers, inner, assumed);
  const state = stateOf(name, inner, { modelDtype, stateDtype, assumed });
  const attention = attentionLayers(name, layers, inner, assumed, state !== undefined);
  const all = layerNames(layers).flatMap((layer, index): LayerShape[] => {
    if (state !== undefined && inner.hybrid_override_pattern?.[index] === "M") {
      const own = layer.replace(".self_attn.attn", ".mixer");
      return [{ name: own, layer: index, kind: "mamba", numKvHeads: 1, bytesPerHeadAndToken: 0, state }];
    }
    if (!attention.has(index)) return [];
    const isWindow = windowed.has(index);
    const own = !isWindow && windowed.size > 0 ? (inner.global_head_dim ?? headSize) : headSize;
    const ownHeads =
      !isWindow && windowed.size > 0 ? (inner.num_global_key_value_heads ?? numKvHeads) : numKvHeads;
    return [
      {
        name: layer,
        layer: index,
        kind: isWindow ? "swa" : "full",
        numKvHeads: ownHeads,
        bytesPerHeadAndToken: 2 * rowBytes(name, dtype, own),
        ...(isWindow && inner.sliding_window != null ? { windowTokens: inner.sliding_window } : {}),
      },
    ];
  });
  return { name, numKvHeads, layers: all, numLayers: layers, assumed, cacheDtype: dtype };
}

/** Bytes of the K, or the V, of one head and token. Errors: `KV_CONFIG_INVALID` for an unknown type. */
function rowBytes(name: string, dtype: string, headSize: number): number {
  const packed = PACKED_ROW_BYTES[dtype];
  return packed === undefined ? headSize * bytesOf(name, dtype, "--kv-cache-dtype") : packed(headSize);
}

function bytesOf(name: string, dtype: string, flag: string): number {
  const bytes = BYTES_OF_DTYPE[dtype];
  if (bytes !== undefined) return bytes;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${name}: dtype "${dtype}" is none of ${Object.keys({ ...BYTES_OF_DTYPE, ...PACKED_ROW_BYTES }).join(", ")}`,
    { hint: `give it with ${flag}` },
  );
}

interface LayerFacts {
  readonly layers: number;
  readonly elementBytes: number;
  readonly assumed: string[];
}

/** MLA. With sparse attention each layer also has the keys of the indexer. */
function latentModel(
  name: string,
  inner: TextConfig,
  { layers, elementBytes, assumed }: LayerFacts,
): ModelShape {
  const isSparse = inner.index_head_dim != null;
  const plain = ((inner.kv_lora_rank ?? 0) + (inner.qk_rope_head_dim ?? 0)) * elementBytes;
  const packed = isSparse && elementBytes === 1;
  if (packed) assumed.push(packedLatents("DeepSeek V3.2"));
  const bytes = packed ? PACKED_LATENT_BYTES["DeepSeek V3.2"] : plain;
  const cache = (own: string, layer: number, bytesPerHeadAndToken: number): LayerShape => ({
    name: own,
    layer,
    kind: "mla",
    numKvHeads: 1,
    bytesPerHeadAndToken,
  });
  const indexer = indexerBytes(inner.index_head_dim ?? 0);
  const indexerOf = (layer: string, index: number): LayerShape => ({
    ...cache(layer.replace(/\.attn$/, ".indexer.k_cache"), index, indexer),
    unscaledBytes: inner.index_head_dim ?? 0,
  });
  if (isSparse) assumed.push(`the indexer's keys are FP8 with their scales: ${indexer} bytes a token`);
  return {
    name,
    numKvHeads: 1,
    layers: layerNames(layers).flatMap((layer, index) => [
      cache(layer, index, bytes),
      ...(isSparse ? [indexerOf(layer, index)] : []),
    ]),
    numLayers: layers,
    assumed,
    ...(isSparse ? { blockTokens: 64 } : {}),
    ...(packed ? { cacheDtype: PACKED_LATENTS } : {}),
  };
}

function compressedModel(
  name: string,
  inner: TextConfig,
  { layers, elementBytes, assumed }: LayerFacts,
): ModelShape {
  const headSize = required(name, "head_dim", inner.head_dim ?? undefined);
  const ratios = inner.compress_ratios ?? [];
  const unknown = ratios.find((ratio) => ratio > 1 && ratio !== 4 && ratio !== 128);
  if (unknown !== undefined || ratios.length < layers) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${name}: compress_ratios ${unknown === undefined ? `has ${ratios.length} entries for ${layers} layers` : `holds ${unknown}; 4 and 128 are known`}`,
      { hint: "describe the regions in a file (--file), or ask two running engines (kv-peer plan)" },
    );
  }
  const packed = elementBytes === 1;
  if (packed) assumed.push(packedLatents("DeepSeek V4"));
  assumed.push(
    "compressors' states are float32; blocks of 64 tokens of windows, 4 and 8 of compressors: as in vLLM 0.33",
  );
  return {
    name,
    numKvHeads: 1,
    layers: compressedLayers({
      layers,
      ratios,
      headSize,
      indexHeadSize: required(name, "index_head_dim", inner.index_head_dim ?? undefined),
      windowTokens: required(name, "sliding_window", inner.sliding_window ?? undefined),
      latentBytes: packed ? PACKED_LATENT_BYTES["DeepSeek V4"] : headSize * elementBytes,
    }),
    numLayers: layers,
    assumed,
    blockTokens: COMPRESSED_BLOCK_TOKENS,
    ...(packed ? { cacheDtype: PACKED_LATENTS } : {}),
  };
}

function packedLatents(model: keyof typeof PACKED_LATENT_BYTES): string {
  return `fp8 latents are packed with their scales: ${PACKED_LATENT_BYTES[model]} bytes each (${PACKED_LATENTS})`;
}

function dtypeOf(name: string, outer: TextConfig, inner: TextConfig, assumed: string[]): string {
  const said = inner.dtype ?? inner.torch_dtype ?? outer.dtype ?? outer.torch_dtype;
  if (said == null) {
    assumed.push(`${name} does not say its dtype: bfloat16`);
    return "bfloat16";
  }
  return said.replace(/^torch\./, "");
}

/** Layers with a sliding window. A config has one of three ways to define them. */
function windowedLayers(layers: number, inner: TextConfig, assumed: string[]): ReadonlySet<number> {
  const all = Array.from({ length: layers }, (_, index) => index);
  if (inner.sliding_window == null || inner.use_sliding_window === false) return new Set();
  if (inner.layer_types != null) {
    const types = inner.layer_types;
    return new Set(all.filter((index) => types[index]?.includes("sliding") === true));
  }
  const pattern = inner.sliding_window_pattern;
  if (pattern != null) return new Set(all.filter((index) => (index + 1) % pattern !== 0));
  assumed.push("sliding_window is set and no layer_types: every layer has the window");
  return new Set(all);
}

/** The state of a hybrid's Mamba 2 layers, where the config says how large it is. */
function stateOf(
  name: string,
  inner: TextConfig,
  {
    modelDtype,
    stateDtype,
    assumed,
  }: { readonly modelDtype: string; readonly stateDtype: string; readonly assumed: string[] },
): StateShape | undefined {
  if (inner.hybrid_override_pattern == null) return undefined;
  const said = stateDtype === "auto" ? inner.mamba_ssm_cache_dtype : stateDtype;
  const state = mamba2State(inner, {
    conv: bytesOf(name, modelDtype, "--kv-cache-dtype"),
    recurrent: bytesOf(name, said ?? "float32", "--ssm-dtype"),
  });
  if (state !== undefined && said == null) assumed.push("--ssm-dtype float32");
  return state;
}

/** Layers with attention. Layers with a state of unknown size are left out, with an entry in `assumed`. */
function attentionLayers(
  name: string,
  layers: number,
  inner: TextConfig,
  assumed: string[],
  hasStates: boolean,
): ReadonlySet<number> {
  const all = Array.from({ length: layers }, (_, index) => index);
  const { hybrid_override_pattern: pattern, layer_types: types } = inner;
  const attends = (index: number): boolean => {
    if (pattern != null) return pattern[index] === "*";
    const type = types?.[index];
    return type === undefined || (type.includes("attention") && type !== "linear_attention");
  };
  const held = all.filter(attends);
  // A layer of experts has no cache.
  const states =
    pattern == null ? layers - held.length : all.filter((index) => pattern[index] === "M").length;
  if (states > 0 && !hasStates)
    assumed.push(
      `${name}: the states of ${states} state-space layers are left out, for the config does not give their sizes; describe the regions with --file`,
    );
  return new Set(held);
}

function layerNames(layers: number): string[] {
  return Array.from({ length: layers }, (_, index) => `model.layers.${index}.self_attn.attn`);
}

function required(name: string, field: string, value: number | undefined): number {
  if (value !== undefined) return value;
  throw new KvError("KV_CONFIG_INVALID", `${name}: ${field} is missing`, {
    hint: "give the config.json of a decoder model from Hugging Face",
  });
}
