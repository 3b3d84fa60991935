import type { AttentionSpec } from "../cache-spec.js";
import {
  divided,
  type Family,
  type LayerDraft,
  type ModelContext,
  type ModelDraft,
} from "../model-draft.js";
import { indexerKeyBytes } from "./latents.js";

/**
 * Tokens in a block of compressed latents, of windows, and of a compressor's running state by its
 * ratio.
 */
const COMPRESSED_BLOCK_TOKENS = 256;
const WINDOW_BLOCK_TOKENS = 64;
const STATE_BLOCK_TOKENS: Readonly<Record<number, number>> = { 4: 4, 128: 8 };
/**
 * 448 FP8 and 64 bfloat16 elements with 8 bytes of scales. Pages are padded to multiples of 576.
 */
const LATENT_BYTES = 584;
const PAGE_ALIGNMENT = 576;
const CACHE_DTYPE = "fp8_ds_mla";

type Latent = Omit<AttentionSpec, "blockSize">;

/**
 * DeepSeek V4 (vLLM 0.33: `deepseek_v4/attention.py`, `compressor.py`, `DeepseekV4SWACache`). Every
 * layer has a window of latents, and latents of 4 or 128 tokens with the compressor's running
 * state, itself a window. Ratio 4 adds an indexer's keys and its compressor.
 */
export const compressedLatents: Family = {
  name: "DeepSeek V4",
  read(context): ModelDraft {
    const { fields } = context;
    const type = fields.text("model_type");
    // The reference code's config.json says "deepseek_ref", which vLLM cannot load.
    if (type !== undefined && type !== "deepseek_v4")
      throw fields.unknownValue("model_type", type, "vLLM 0.33 loads DeepSeek V4 as deepseek_v4");
    const layers = fields.layers("num_hidden_layers");
    divided(context, fields.count("num_attention_heads"), "attention heads");
    const ratios = ratiosOf(context, layers);
    if (context.cacheDtype !== "auto" && !context.cacheDtype.startsWith("fp8"))
      throw fields.unknownValue(
        "the cache dtype",
        context.cacheDtype,
        "DeepSeek V4 keeps its latents as FP8 with scales (fp8_ds_mla)",
      );
    const sizes = {
      headSize: fields.count("head_dim"),
      indexSize: fields.count("index_head_dim"),
      window: fields.count("sliding_window"),
    };
    return {
      numLayers: layers,
      numKvHeads: 1,
      backends: [
        { name: "FLASHMLA_SPARSE_DSV4", kernelTokens: COMPRESSED_BLOCK_TOKENS, only: true },
      ],
      blockSize: COMPRESSED_BLOCK_TOKENS,
      layout: "BLHNC",
      cacheDtype: CACHE_DTYPE,
      layers: ratios.slice(0, layers).flatMap((ratio, layer) => cachesOfLayer(layer, ratio, sizes)),
    };
  },
};

function ratiosOf({ fields }: ModelContext, layers: number): readonly number[] {
  const ratios = fields.perLayer<number>("compress_ratios", "number", layers);
  if (ratios === undefined)
    throw fields.unknownValue("compress_ratios", null, "each layer's ratio is needed");
  const unknown = ratios.find((ratio) => ratio > 1 && STATE_BLOCK_TOKENS[ratio] === undefined);
  if (unknown !== undefined)
    throw fields.unknownValue("compress_ratios", [unknown], "0, 1, 4 and 128 are known");
  return ratios;
}

interface Sizes {
  readonly headSize: number;
  readonly indexSize: number;
  readonly window: number;
}

function cachesOfLayer(layer: number, ratio: number, sizes: Sizes): LayerDraft[] {
  const at = `model.layers.${layer}.attn`;
  const one = { numKvHeads: 1, headSizeV: 0, dtype: "uint8", alignment: PAGE_ALIGNMENT } as const;
  const latent = {
    ...one,
    headSize: sizes.headSize,
    contentBytes: LATENT_BYTES,
    cacheDtype: CACHE_DTYPE,
  };
  const window: LayerDraft = {
    name: `${at}.swa_cache`,
    layer,
    spec: { class: "SlidingWindowMLASpec", ...latent, slidingWindow: sizes.window },
    blockSize: WINDOW_BLOCK_TOKENS,
  };
  if (ratio <= 1) return [window];
  const compressed = (name: string, spec: Omit<Latent, "class">): LayerDraft => ({
    name,
    layer,
    spec: {
      class: "MLAAttentionSpec",
      ...spec,
      tokensPerState: ratio,
      kernelBlock: COMPRESSED_BLOCK_TOKENS,
    },
  });
  // With ratio 4, windows of two latents overlap.
  const spans = ratio === 4 ? 2 : 1;
  const state = (name: string, headSize: number): LayerDraft => ({
    name,
    layer,
    spec: {
      class: "SlidingWindowMLASpec",
      ...one,
      dtype: "float32",
      headSize: 2 * spans * headSize,
      slidingWindow: spans * ratio,
    },
    blockSize: STATE_BLOCK_TOKENS[ratio] as number,
  });
  const own = [
    window,
    compressed(at, latent),
    state(`${at}.compressor.state_cache`, sizes.headSize),
  ];
  if (ratio !== 4) return own;
  return [
    compressed(`${at}.indexer.k_cache`, { ...one, headSize: indexerKeyBytes(sizes.indexSize) }),
    state(`${at}.indexer.compressor.state_cache`, sizes.indexSize),
    ...own,
  ];
}
