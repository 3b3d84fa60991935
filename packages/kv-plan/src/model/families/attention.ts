import { KvError } from "@kv/interface";
import { elementsOf } from "../cache-dtype.js";
import type { AttentionSpec } from "../cache-spec.js";
import {
  divided,
  type Family,
  FLASH_ATTN,
  headsOfRank,
  layersOf,
  type ModelContext,
  type ModelDraft,
} from "../model-draft.js";

/** Heads and head size of a model, for most architectures. */
interface HeadShape {
  readonly heads: number;
  readonly kvHeads: number;
  readonly headSize: number;
}

/**
 * Where a config lacks KV heads or a head size, the values that transformers 5 gives to models of a
 * type.
 */
const KV_HEADS_OF_TYPE: Readonly<Record<string, number>> = {
  mistral: 8,
  ministral3: 8,
  mixtral: 8,
  phimoe: 8,
  gpt_oss: 8,
  jamba: 8,
  falcon_h1: 8,
  lfm2: 8,
  lfm2_moe: 8,
  minimax_m2: 8,
  seed_oss: 8,
  nemotron_h: 8,
  llama4_text: 8,
  gemma: 16,
  gemma2: 4,
  gemma3_text: 4,
  gemma4_text: 4,
  qwen2: 32,
  qwen3: 32,
  qwen3_moe: 4,
  qwen2_moe: 16,
  qwen3_next: 2,
  starcoder2: 2,
  glm: 2,
  glm4: 2,
  glm4_moe: 8,
  ernie4_5: 2,
  ernie4_5_moe: 4,
  smollm3: 4,
  qwen3_5_text: 4,
  qwen3_5_moe_text: 2,
  stablelm: 32,
  olmoe: 16,
  gemma3n_text: 2,
};
const HEADS_OF_TYPE: Readonly<Record<string, number>> = { gemma3_text: 8, gemma4_text: 8 };
const HEAD_SIZE_OF_TYPE: Readonly<Record<string, number>> = {
  gemma: 256,
  gemma2: 256,
  gemma3_text: 256,
  gemma3n_text: 256,
  gemma4_text: 256,
  qwen3: 128,
  qwen3_next: 256,
  qwen3_5_text: 256,
  qwen3_5_moe_text: 256,
  qwen3_vl_text: 128,
  qwen3_vl_moe_text: 128,
  gpt_oss: 64,
  glm: 128,
  glm4: 128,
  ernie4_5: 128,
  seed_oss: 128,
  minimax_m2: 128,
  nemotron_h: 128,
  llama4_text: 128,
  helium: 128,
  afmoe: 128,
  step3p5: 128,
};

const LAYERS = ["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
const HEADS = ["num_attention_heads", "n_head", "n_heads"];
const HIDDEN = ["hidden_size", "n_embd", "d_model"];
/** vLLM's `CONFIG_FIELD_ALIASES` of `total_num_kv_heads`, in its order. */
const KV_HEADS = [
  "n_head_kv",
  "num_kv_heads",
  "num_key_value_heads",
  "multi_query_group_num",
  "num_attention_groups",
];

/**
 * Layers, heads and head size, with vLLM's aliases of the fields.
 * @throws The errors of `headShapeOf`.
 */
export function shapeOf(
  context: ModelContext,
  kvHeadsOf?: (context: ModelContext) => number | undefined,
): HeadShape & { readonly layers: number } {
  return { layers: context.fields.layers(LAYERS), ...headShapeOf(context, kvHeadsOf) };
}

/**
 * Heads and head size, with vLLM's aliases of the fields.
 * @throws `KV_CONFIG_INVALID`; `KV_PLAN_UNSUPPORTED` for a TP size that vLLM refuses.
 */
export function headShapeOf(
  context: ModelContext,
  kvHeadsOf?: (context: ModelContext) => number | undefined,
): HeadShape {
  const { fields, assumed } = context;
  const type = fields.text("model_type") ?? "";
  const heads = fields.count(HEADS, HEADS_OF_TYPE[type]);
  divided(context, heads, "attention heads");
  let kvHeads = kvHeadsOf?.(context) ?? fields.optionalCount(...KV_HEADS);
  if (kvHeads === undefined || kvHeads === 0) {
    kvHeads = KV_HEADS_OF_TYPE[type] ?? heads;
    const why =
      KV_HEADS_OF_TYPE[type] === undefined
        ? "as many as attention heads"
        : `as models of type ${type} have it`;
    assumed.push(`num_key_value_heads is missing: ${why}, ${kvHeads}`);
  }
  const said = fields.optionalCount("head_dim", "hidden_size_per_head", "kv_channels");
  const known = HEAD_SIZE_OF_TYPE[type];
  if (said === undefined)
    assumed.push(
      known === undefined
        ? "head_dim is missing: hidden_size / num_attention_heads"
        : `head_dim is missing: as models of type ${type} have it, ${known}`,
    );
  const headSize = said || known || fields.count(HIDDEN) / heads;
  if (!Number.isInteger(headSize))
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${context.name}: hidden_size does not divide into ${heads} attention heads, and head_dim is missing`,
    );
  if (heads % kvHeads !== 0)
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${context.name}: ${heads} attention heads do not divide among ${kvHeads} KV heads`,
    );
  return { heads, kvHeads, headSize };
}

/** K and V of the KV heads of a rank. */
export function attentionSpec(
  context: ModelContext,
  given: {
    readonly kvHeads: number;
    readonly headSize: number;
    readonly headSizeV?: number;
    readonly window?: number | undefined;
    readonly chunk?: number | undefined;
    readonly cross?: boolean;
  },
): Omit<AttentionSpec, "blockSize"> {
  const { kvHeads, headSize, headSizeV = headSize, window, chunk, cross = false } = given;
  const shape = {
    numKvHeads: headsOfRank(context, kvHeads),
    modelKvHeads: kvHeads,
    headSize,
    headSizeV,
    ...elementsOf(context, headSize, headSizeV),
  };
  if (cross) return { class: "CrossAttentionSpec", ...shape };
  if (chunk !== undefined)
    return { class: "ChunkedLocalAttentionSpec", ...shape, attentionChunkSize: chunk };
  if (window !== undefined) return { class: "SlidingWindowSpec", ...shape, slidingWindow: window };
  return { class: "FullAttentionSpec", ...shape };
}

/** How an architecture names its layers, and which of them have a window. */
export interface DenseRules {
  readonly family: string;
  /** Name of a layer's cache, with `*` for its number. */
  readonly layerName?: string;
  /**
   * `model`: one window for all layers, or none. `types`: by the layer's type too. `off`: no window
   * while `use_sliding_window` is off. Default `model`.
   */
  readonly windows?: "model" | "types" | "off";
  /** Types of the layers where the config does not list them. */
  readonly defaultTypes?: (context: ModelContext, layers: number) => readonly string[];
  /** The window counts a token more than the config says. */
  readonly windowPlus?: number;
  /** The window where the config does not give one. */
  readonly defaultWindow?: number;
  readonly ignore?: readonly string[];
  /** KV heads that a field of this architecture gives; undefined where it does not. */
  readonly kvHeads?: (context: ModelContext) => number | undefined;
  /** vLLM's class of the architecture keeps the model's type, whatever `--kv-cache-dtype` says. */
  readonly keepsModelDtype?: boolean;
  /** The last layers use the caches of earlier ones, as many as this field says. */
  readonly sharedLayers?: { readonly field: string; readonly otherwise: number };
}

/** Models in which every layer is attention with grouped heads, some of them with a window. */
export function dense(rules: DenseRules): Family {
  return {
    name: rules.family,
    read(context): ModelDraft {
      const shape = shapeOf(context, rules.kvHeads);
      const { fields } = context;
      fields.ignore(...(rules.ignore ?? []));
      const shared = rules.sharedLayers;
      const without =
        shared === undefined ? 0 : (fields.optionalCount(shared.field) ?? shared.otherwise);
      const windowOf = windowsOf(context, rules, shape.layers);
      const { layerName = "model.layers.*.self_attn.attn", keepsModelDtype = false } = rules;
      const typed = keepsModelDtype ? { ...context, cacheDtype: "auto" } : context;
      return {
        numLayers: shape.layers,
        numKvHeads: shape.kvHeads,
        backends: [FLASH_ATTN],
        layers: layersOf(Math.max(1, shape.layers - without), (layer) => ({
          [layerName]: attentionSpec(typed, { ...shape, window: windowOf(layer) }),
        })),
      };
    },
  };
}

/**
 * vLLM's rule: a layer's own type decides; a window of the whole model only where no layer has a
 * type, or all are sliding.
 */
export function windowsOf(
  context: ModelContext,
  { windows = "model", defaultTypes, windowPlus = 0, defaultWindow }: DenseRules,
  layers: number,
): (layer: number) => number | undefined {
  const { fields } = context;
  const said = fields.optionalCount("sliding_window") ?? defaultWindow;
  const window = said === 0 ? undefined : said;
  const types =
    fields.perLayer<string>("layer_types", "string", layers) ?? defaultTypes?.(context, layers);
  for (const type of types ?? [])
    if (type !== "sliding_attention" && type !== "full_attention")
      throw fields.unknownValue(
        "layer_types",
        [type],
        "full_attention and sliding_attention are known",
      );
  if (windows === "off") {
    const full = fields.optionalCount("max_window_layers") ?? 0;
    const isOn = fields.flag("use_sliding_window", false);
    if ((isOn && full < layers) || types?.includes("sliding_attention"))
      throw fields.unknownValue(
        "use_sliding_window",
        true,
        "vLLM knows no window in some layers of this model",
      );
    return () => undefined;
  }
  if (types === undefined || types.every((type) => type === "sliding_attention"))
    return () => (window === undefined ? undefined : window + windowPlus);
  if (windows === "model") return () => undefined;
  if (types.includes("sliding_attention") && window === undefined)
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${context.name}: layers are sliding_attention, and sliding_window is missing`,
    );
  return (layer) =>
    types[layer] === "sliding_attention" && window !== undefined ? window + windowPlus : undefined;
}

/** One KV head for all heads where `multi_query` says so, and no new decoder says otherwise. */
export function multiQueryHeads({ fields }: ModelContext): number | undefined {
  const isMulti = fields.flag("multi_query", true);
  return isMulti && !fields.flag("new_decoder_architecture", false) ? 1 : undefined;
}

/** One full layer after every so many. */
export const everyNthFull =
  (field: string | undefined, otherwise: number) =>
  ({ fields }: ModelContext, layers: number): readonly string[] => {
    const said = field === undefined ? undefined : fields.value(field);
    if (field !== undefined && typeof said === "string")
      throw fields.unknownValue(
        field,
        said,
        "layer_types is needed beside letters: without it vLLM refuses the model",
      );
    const every = field === undefined ? otherwise : fields.count(field, otherwise);
    return Array.from({ length: layers }, (_, index) =>
      (index + 1) % every === 0 ? "full_attention" : "sliding_attention",
    );
  };
