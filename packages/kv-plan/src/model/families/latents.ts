import { elementsOf, isFp8 } from "../cache-dtype.js";
import type { AttentionSpec } from "../cache-spec.js";
import type { ConfigFields } from "../config-fields.js";
import {
  type Backend,
  divided,
  type Family,
  layersOf,
  type ModelContext,
  type ModelDraft,
} from "../model-draft.js";

/** A latent with its scales in sparse MLA (vLLM: `fp8_ds_mla`). */
const PACKED_LATENT_BYTES = 656;
/** Kernel block of sparse MLA, its indexer, and dense MLA with FP8 latents. */
const MLA_KERNEL_TOKENS = 64;
const LAYERS = ["num_hidden_layers", "num_layers"];
const LAYER_NAME = "model.layers.*.self_attn.attn";

/** Elements of an indexer's key that share a scale. */
const SCALED_ELEMENTS = 128;
const SCALE_BYTES = 4;

/** Returns bytes of an indexer's FP8 key with its float32 scales: one for each whole part. */
export function indexerKeyBytes(headSize: number): number {
  return headSize + Math.floor(headSize / SCALED_ELEMENTS) * SCALE_BYTES;
}

/** `indexerKeyBytes` without the scales. */
export function unscaledKeyBytes(keyBytes: number): number {
  return keyBytes - Math.floor(keyBytes / (SCALED_ELEMENTS + SCALE_BYTES)) * SCALE_BYTES;
}

/** The compressed K and V, and the part with positions. */
export function latentSize(fields: ConfigFields): number {
  fields.ignore("q_lora_rank", "qk_nope_head_dim", "v_head_dim", "head_dim", "qk_head_dim");
  fields.ignore("num_key_value_heads");
  return fields.count("kv_lora_rank") + (fields.optionalCount("qk_rope_head_dim") ?? 0);
}

/** Latents of DeepSeek, and all that FLASHMLA takes. */
const LATENT = 576;
const FLASHMLA_LATENTS = [320, 512, LATENT];

/** Dense MLA on an H100: FP8 latents have kernel blocks of 64 tokens, where FLASHMLA takes them. */
export function denseMlaBackend(context: ModelContext, headSize: number): Backend {
  if (!isFp8(context)) return { name: "FLASH_ATTN_MLA", kernelTokens: 16 };
  return FLASHMLA_LATENTS.includes(headSize)
    ? { name: "FLASHMLA", kernelTokens: MLA_KERNEL_TOKENS, only: true }
    : { name: "TRITON_MLA", kernelTokens: 16 };
}

/** One latent per token, the same on every rank. */
export function denseLatentSpec(
  context: ModelContext,
  headSize: number,
): Omit<AttentionSpec, "blockSize"> {
  return {
    class: "MLAAttentionSpec",
    numKvHeads: 1,
    headSize,
    headSizeV: 0,
    ...elementsOf(context, headSize, 0),
    cacheDtype: context.cacheDtype,
    ...(denseMlaBackend(context, headSize).only ? { kernelBlock: MLA_KERNEL_TOKENS } : {}),
  };
}

const latentsOf = (name: string, caches: readonly string[]): Family => ({
  name,
  read(context): ModelDraft {
    const { fields } = context;
    if (fields.has("index_topk")) return sparse(context);
    const layers = fields.layers(LAYERS);
    divided(context, fields.count("num_attention_heads"), "attention heads");
    const size = latentSize(fields);
    const spec = denseLatentSpec(context, size);
    return {
      numLayers: layers,
      numKvHeads: 1,
      backends: [denseMlaBackend(context, size)],
      layout: "LBNHC",
      layers: layersOf(layers, () => Object.fromEntries(caches.map((cache) => [cache, spec]))),
    };
  },
});

/** Multi-head latent attention (DeepSeek V2, V3, R1; Kimi K2). */
export const latents = latentsOf("multi-head latent attention", [LAYER_NAME]);

/** Two attentions in each layer. */
export const doubleLatents = latentsOf("LongCat Flash", [
  "model.layers.*.self_attn.0.attn",
  "model.layers.*.self_attn.1.attn",
]);

/** Layers say of themselves whether they have their own indexer. */
export const typedIndexers: Family = {
  name: "Hunyuan V4",
  read(context) {
    const { fields } = context;
    const types = fields.perLayer<string>("indexer_types", "string", fields.layers(LAYERS));
    return sparse(context, (layer) => types?.[layer] !== "shared");
  },
};

/** Sparse MLA: an indexer's keys beside each layer's latents (DeepSeek V3.2, GLM 5). */
function sparse(
  context: ModelContext,
  leads = leadersOf(context.fields, context.fields.layers(LAYERS)),
): ModelDraft {
  const { fields } = context;
  const layers = fields.layers(LAYERS);
  divided(context, fields.count("num_attention_heads"), "attention heads");
  fields.ignore("index_n_heads", "index_topk", "layer_types");
  const headSize = latentSize(fields);
  if (headSize === 512 || (isFp8(context) && headSize !== LATENT))
    throw fields.unknownValue(
      "kv_lora_rank",
      fields.value("kv_lora_rank"),
      `sparse latents of ${LATENT} elements are known`,
    );
  const backend = sparseBackend(context);
  const keys: Omit<AttentionSpec, "blockSize"> = {
    class: "MLAAttentionSpec",
    numKvHeads: 1,
    headSizeV: 0,
    dtype: "uint8",
    role: "indexer",
    headSize: indexerKeyBytes(fields.count("index_head_dim")),
    kernelBlock: MLA_KERNEL_TOKENS,
  };
  const plain = elementsOf(context, headSize, 0);
  const isPacked = backend.name === "FLASHMLA_SPARSE" && isFp8(context);
  const cacheDtype = isPacked ? "fp8_ds_mla" : context.cacheDtype;
  const latent: Omit<AttentionSpec, "blockSize"> = {
    class: "MLAAttentionSpec",
    numKvHeads: 1,
    headSize,
    headSizeV: 0,
    ...plain,
    cacheDtype,
    ...(isPacked
      ? { contentBytes: PACKED_LATENT_BYTES, kernelBlock: MLA_KERNEL_TOKENS }
      : { strideAlignment: headSize * (plain.dtype === "uint8" ? 1 : 2) }),
  };
  return {
    numLayers: layers,
    numKvHeads: 1,
    backends: [
      { name: "DEEPSEEK_V32_INDEXER", kernelTokens: MLA_KERNEL_TOKENS, only: true },
      backend,
    ],
    layout: "LBNHC",
    cacheDtype,
    layers: layersOf(layers, (layer) => {
      if (!leads(layer)) return { [LAYER_NAME]: latent };
      const indexer = LAYER_NAME.replace(/\.attn$/, ".indexer.k_cache");
      return { [indexer]: keys, [LAYER_NAME]: { ...latent, role: "index group leader" } };
    }),
  };
}

/** On an H100. A checkpoint's FP8 has one scale per tensor; `--kv-cache-dtype fp8` is packed. */
function sparseBackend(context: ModelContext): Backend {
  if (!isFp8(context)) return { name: "FLASH_ATTN_MLA_SPARSE", kernelTokens: MLA_KERNEL_TOKENS };
  if (context.cacheDtype === "fp8_e4m3")
    return { name: "FLASHINFER_MLA_SPARSE_SM90", kernelTokens: MLA_KERNEL_TOKENS };
  return { name: "FLASHMLA_SPARSE", kernelTokens: MLA_KERNEL_TOKENS, only: true };
}

/** Layers with their own indexer; others reuse the previous layer's choice. */
function leadersOf(fields: ConfigFields, layers: number): (layer: number) => boolean {
  // The field repeats the frequency, which vLLM reads.
  fields.ignore("indexer_types");
  const every = fields.count("index_topk_freq", 1);
  const offset = fields.optionalCount("index_skip_topk_offset") ?? 2;
  const pattern = fields.value("index_topk_pattern");
  if (pattern === undefined) return (layer) => Math.max(layer - offset + 1, 0) % every === 0;
  const letters = typeof pattern === "string" ? [...pattern] : pattern;
  if (Array.isArray(letters) && letters.length >= layers) return (layer) => letters[layer] !== "S";
  throw fields.unknownValue(
    "index_topk_pattern",
    pattern,
    `a letter for each of ${layers} layers is known`,
  );
}
