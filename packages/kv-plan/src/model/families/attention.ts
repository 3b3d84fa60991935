import { KvError } from "@kv/interface";
import { elementsOf, isFp8 } from "../cache-dtype.js";
import type { AttentionSpec } from "../cache-spec.js";
import type { ConfigFields } from "../config-fields.js";
import {
  divided,
  type Family,
  FLASH_ATTN,
  headsOfRank,
  type LayerDraft,
  layersOf,
  type ModelContext,
  type ModelDraft,
} from "../model-draft.js";

interface HeadShape {
  readonly heads: number;
  readonly kvHeads: number;
  readonly headSize: number;
}

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
 * Reads vLLM's aliases of the fields.
 * @throws The errors of `headShapeOf`.
 */
export function shapeOf(
  context: ModelContext,
  kvHeadsOf?: (context: ModelContext) => number | undefined,
  equalHeads = false,
): HeadShape & { readonly layers: number } {
  agreed(context.fields, LAYERS);
  const layers = context.fields.layers(LAYERS);
  return { layers, ...headShapeOf(context, kvHeadsOf, equalHeads) };
}

/**
 * Reads vLLM's aliases of the fields.
 * @throws `KV_CONFIG_INVALID`; `KV_PLAN_UNSUPPORTED` for heads and TP sizes that vLLM refuses.
 */
export function headShapeOf(
  context: ModelContext,
  kvHeadsOf?: (context: ModelContext) => number | undefined,
  equalHeads = false,
): HeadShape {
  const { fields, assumed, shapes } = context;
  const type = fields.text("model_type") ?? "";
  const [knownHeads, knownKvHeads, knownSize] = shapes[type] ?? [];
  const heads = fields.count(HEADS, knownHeads ?? undefined);
  divided(context, heads, "attention heads");
  let kvHeads = kvHeadsOf?.(context) ?? agreed(fields, KV_HEADS);
  if (kvHeads === undefined || kvHeads === 0) {
    kvHeads = knownKvHeads ?? heads;
    const why =
      knownKvHeads == null ? "as many as attention heads" : `as models of type ${type} have it`;
    assumed.push(`num_key_value_heads is missing: ${why}, ${kvHeads}`);
  }
  const said = fields.optionalCount("head_dim", "hidden_size_per_head", "kv_channels");
  const known = knownSize ?? undefined;
  if (said === undefined)
    assumed.push(
      known === undefined
        ? "head_dim is missing: hidden_size / num_attention_heads"
        : `head_dim is missing: as models of type ${type} have it, ${known}`,
    );
  const sizeOfEqual = () => fields.count(HIDDEN) / heads;
  const headSize = equalHeads ? sizeOfEqual() : said || known || sizeOfEqual();
  if (!Number.isInteger(headSize))
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${context.name}: hidden_size does not divide into ${heads} attention heads, and head_dim is missing`,
    );
  const counts = HEADS.flatMap((name) => fields.optionalCount(name) ?? []);
  const isOff = (count: number) => count % kvHeads !== 0 || count % context.tpSize !== 0;
  if (counts.some((count) => count !== heads && (said === undefined || isOff(count))))
    throw fields.unknownValue(HEADS.join(", "), counts, "which of these vLLM takes is not known");
  if (heads % kvHeads !== 0)
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${context.name}: ${heads} attention heads do not divide among ${kvHeads} KV heads`,
    );
  const rotary = fields.optionalCount("rotary_dim");
  if (rotary !== undefined && rotary > headSize)
    throw fields.unknownValue("rotary_dim", rotary, `heads of ${headSize} elements have no more`);
  return { heads, kvHeads, headSize };
}

/** @throws `KV_PLAN_UNSUPPORTED` where names of the same meaning have different values. */
function agreed(fields: ConfigFields, names: readonly string[]): number | undefined {
  const counts = names.map((name) => fields.optionalCount(name));
  const [first, second] = new Set(counts.filter((count) => count !== undefined));
  if (second === undefined) return first;
  throw fields.unknownValue(
    names[counts.indexOf(second)] ?? "",
    second,
    `another field says ${first}`,
  );
}

/** On an H100, FlashAttention 4 reads FP8 heads of 512 elements in blocks of 64 tokens. */
const WIDE_HEAD = 512;
const WIDE_HEAD_TOKENS = 64;
/** FlashAttention's heads are multiples of these elements. */
const HEAD_STEP = 8;

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
  if (headSize % HEAD_STEP !== 0 || headSize > WIDE_HEAD)
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${context.name}: heads of ${headSize} elements: which backend vLLM takes for them is not known`,
    );
  const shape = {
    ...(isFp8(context) && headSize === WIDE_HEAD ? { kernelBlock: WIDE_HEAD_TOKENS } : {}),
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

/** Attention in every layer, as the table of architectures describes it. */
export interface AttentionRule {
  /** Cache name, in which `*` is the layer's number. */
  readonly layer?: string;
  /**
   * `model`: one window for all layers, or none; or a window in the layers whose type says so.
   * `types`: by layer type only. `every`: by `every`, unless the config lists windows for all layers.
   * `off`: none. Default `model`.
   */
  readonly windows?: "model" | "types" | "every" | "off";
  /** Where the config lists no types: every nth layer is full, by this field and its default, or 0. */
  readonly every?: readonly [field: string | null, otherwise: number];
  /** Tokens that the window has beyond the config's number. */
  readonly plus?: number;
  readonly window?: number;
  /** The field that lists each layer's window, null for none. */
  readonly windowList?: string;
  /** The layer type that has no cache. */
  readonly skipped?: string;
  /** The cache of layer `l` has the number `l * step`. */
  readonly step?: number;
  /** One KV head where `multi_query` says so. */
  readonly multiQuery?: boolean;
  /** Latents are not kept: each head has its K and V, both of K's size. */
  readonly expanded?: boolean;
  /** A head is `hidden_size / num_attention_heads`, whatever else the config says. */
  readonly equalHeads?: boolean;
  /** Ranks have no replicas of KV heads. */
  readonly unshared?: boolean;
  /** vLLM's class keeps the model's type, whatever `--kv-cache-dtype` says. */
  readonly keepsDtype?: boolean;
  /** The field that counts the last layers with earlier layers' caches, and its default. */
  readonly shared?: readonly [field: string, otherwise: number];
}

const SELF_ATTENTION = "model.layers.*.self_attn.attn";

/** Attention with grouped heads, with or without windows. */
export function dense(rule: AttentionRule): Family {
  const { layer: layerName = SELF_ATTENTION, windows, every, shared, step = 1, windowList } = rule;
  return {
    name: windows === "types" || every !== undefined ? "attention with windows" : "dense attention",
    read(context): ModelDraft {
      const { fields } = context;
      const read = shapeOf(
        context,
        rule.multiQuery === true ? multiQueryHeads : undefined,
        rule.equalHeads,
      );
      const shape = rule.expanded === true ? expanded(fields, read) : read;
      if (rule.unshared === true) divided(context, shape.kvHeads, "KV heads");
      const borrowed = shared === undefined ? 0 : (fields.optionalCount(shared[0]) ?? shared[1]);
      const windowOf =
        windowList === undefined
          ? windowsOf(context, rule, shape.layers)
          : listedWindows(context, windowList, shape.layers);
      const types = fields.perLayer<string>("layer_types", "string", shape.layers);
      const typed = rule.keepsDtype === true ? { ...context, cacheDtype: "auto" } : context;
      return {
        numLayers: shape.layers,
        numKvHeads: shape.kvHeads,
        backends: [FLASH_ATTN],
        layers: layersOf(shape.layers, (layer): Record<string, LayerDraft["spec"]> => {
          const window = windowOf(layer);
          if (rule.skipped !== undefined && types?.[layer] === rule.skipped) return {};
          if (borrows(layer, shape.layers - borrowed, window)) return {};
          const name = layerName.replace("*", String(layer * step));
          return { [name]: attentionSpec(typed, { ...shape, window }) };
        }),
      };
    },
  };
}

/** Whether a layer has the cache of the last own one of its kind, which must be there. */
function borrows(layer: number, first: number, window: number | undefined): boolean {
  return layer >= first && first >= (window === undefined ? 1 : 2);
}

/** A layer's type decides; where no layer has a type, or all are sliding, the model's window. */
export function windowsOf(
  context: ModelContext,
  rule: Pick<AttentionRule, "windows" | "every" | "plus" | "window" | "skipped">,
  layers: number,
  defaultTypes?: readonly string[],
): (layer: number) => number | undefined {
  const { fields } = context;
  const { windows = "model", every, plus = 0 } = rule;
  const otherwise = fields.kindOf("sliding_window") === "null" ? undefined : rule.window;
  const said = fields.optionalCount("sliding_window") ?? otherwise;
  const window = said === undefined || said === 0 ? undefined : said + plus;
  const listed = fields.perLayer<string>("layer_types", "string", layers);
  const isMixed = listed?.some((type) => type !== "sliding_attention") === true;
  const types =
    (windows === "every" && isMixed ? undefined : listed) ??
    defaultTypes ??
    (every && everyNthFull(context, layers, every));
  const known = ["full_attention", "sliding_attention", rule.skipped];
  for (const type of types ?? [])
    if (!known.includes(type))
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
        isOn,
        "vLLM knows no window in some layers of this model",
      );
    return () => undefined;
  }
  const slides = types?.includes("sliding_attention") ?? windows === "model";
  if (slides && window === undefined && types !== undefined)
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${context.name}: layers are sliding_attention, and sliding_window is missing`,
    );
  if (types === undefined) return () => (windows === "model" ? window : undefined);
  return (layer) => (types[layer] === "sliding_attention" ? window : undefined);
}

/** @throws `KV_PLAN_UNSUPPORTED` for what is no list of numbers and nulls. */
function listedWindows({ fields }: ModelContext, field: string, layers: number) {
  const list = fields.value(field);
  const isWindow = (value: unknown) =>
    value === null || (typeof value === "number" && Number.isSafeInteger(value) && value >= 0);
  if (!Array.isArray(list) || list.length < layers || !list.every(isWindow))
    throw fields.unknownValue(
      field,
      list,
      `a number or null for each of ${layers} layers is known`,
    );
  if (fields.has("sliding_window") && list.includes(null))
    throw fields.unknownValue(
      "sliding_window",
      fields.value("sliding_window"),
      `it is not known beside a null in ${field}`,
    );
  return (layer: number): number | undefined => list[layer] ?? undefined;
}

function expanded<T extends HeadShape>(fields: ConfigFields, shape: T): T {
  const headSize = fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim");
  return { ...shape, kvHeads: shape.heads, headSize };
}

/** One KV head where `multi_query` says so and no new decoder says otherwise. */
function multiQueryHeads({ fields }: ModelContext): number | undefined {
  const isMulti = fields.flag("multi_query", true);
  return isMulti && !fields.flag("new_decoder_architecture", false) ? 1 : undefined;
}

export function everyNthFull(
  { fields }: ModelContext,
  layers: number,
  [field, otherwise]: readonly [field: string | null, otherwise: number],
): readonly string[] {
  const said = field === null ? undefined : fields.value(field);
  if (field !== null && typeof said === "string")
    throw fields.unknownValue(
      field,
      said,
      "layer_types is needed beside letters: without it vLLM refuses the model",
    );
  const every = field === null ? otherwise : fields.count(field, otherwise || undefined);
  return Array.from({ length: layers }, (_, index) =>
    (index + 1) % every === 0 ? "full_attention" : "sliding_attention",
  );
}
