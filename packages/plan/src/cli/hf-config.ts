import { KvError } from "@kv/interface";
import { z } from "zod";
import type { LayerShape, ModelShape } from "./model-shape.js";

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

const count = z.int().min(1).max(1_000_000);
/** The fields that decide a cache, of any architecture. Others are of no concern here. */
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
  torch_dtype: z.string().max(100).nullish(),
  dtype: z.string().max(100).nullish(),
});
const config = text.extend({ text_config: text.nullish() });

type TextConfig = z.infer<typeof text>;

/**
 * Reads what a Hugging Face `config.json` says of the KV cache. `cacheDtype` is vLLM's `--kv-cache-dtype`: "auto" is the model's. Errors:
 * `KV_CONFIG_INVALID` naming the field, `KV_PLAN_UNSUPPORTED` for a cache that this tool cannot lay out.
 */
export function modelFromHfConfig(name: string, value: unknown, cacheDtype = "auto"): ModelShape {
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
  const dtype = cacheDtype === "auto" ? dtypeOf(name, outer, inner, assumed) : cacheDtype;
  const elementBytes = BYTES_OF_DTYPE[dtype];
  if (elementBytes === undefined) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${name}: dtype "${dtype}" is none of ${Object.keys(BYTES_OF_DTYPE).join(", ")}`,
      {
        hint: "say it with --kv-cache-dtype",
      },
    );
  }
  refuseUnknownCaches(name, inner);
  if (inner.kv_lora_rank != null) {
    const latent = inner.kv_lora_rank + (inner.qk_rope_head_dim ?? 0);
    return {
      name,
      numKvHeads: 1,
      layers: layerNames(layers).map((layer) => ({
        name: layer,
        kind: "mla",
        numKvHeads: 1,
        bytesPerHeadAndToken: latent * elementBytes,
      })),
      assumed,
    };
  }
  const heads = required(name, "num_attention_heads", inner.num_attention_heads);
  if (inner.num_key_value_heads == null)
    assumed.push(`num_key_value_heads is not said: as many as attention heads, ${heads}`);
  const numKvHeads = inner.num_key_value_heads ?? heads;
  if (inner.head_dim == null) assumed.push("head_dim is not said: hidden_size / num_attention_heads");
  const headSize = inner.head_dim ?? required(name, "hidden_size", inner.hidden_size) / heads;
  const windowed = windowedLayers(layers, inner, assumed);
  const attention = attentionLayers(name, layers, inner, assumed);
  const all = layerNames(layers).flatMap((layer, index): LayerShape[] => {
    if (!attention.has(index)) return [];
    const isWindow = windowed.has(index);
    const own = !isWindow && windowed.size > 0 ? (inner.global_head_dim ?? headSize) : headSize;
    const ownHeads =
      !isWindow && windowed.size > 0 ? (inner.num_global_key_value_heads ?? numKvHeads) : numKvHeads;
    return [
      {
        name: layer,
        kind: isWindow ? "swa" : "full",
        numKvHeads: ownHeads,
        bytesPerHeadAndToken: 2 * own * elementBytes,
        ...(isWindow && inner.sliding_window != null ? { windowTokens: inner.sliding_window } : {}),
      },
    ];
  });
  return { name, numKvHeads, layers: all, assumed };
}

function refuseUnknownCaches(name: string, inner: TextConfig): void {
  if (inner.compress_ratios != null) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${name}: compressed MLA (compress_ratios) cannot be laid out from a config alone`,
      {
        hint: "describe the regions in a file (--file), or ask two live engines (--from)",
      },
    );
  }
  if (inner.index_head_dim != null && inner.kv_lora_rank != null) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${name}: the cache of a sparse attention indexer cannot be laid out from a config alone`,
      {
        hint: "describe the regions in a file (--file), or ask two live engines (--from)",
      },
    );
  }
}

function dtypeOf(name: string, outer: TextConfig, inner: TextConfig, assumed: string[]): string {
  const said = inner.dtype ?? inner.torch_dtype ?? outer.dtype ?? outer.torch_dtype;
  if (said == null) {
    assumed.push(`${name} does not say its dtype: bfloat16`);
    return "bfloat16";
  }
  return said.replace(/^torch\./, "");
}

/** Layers with a window, by what the config says in one of its three ways. */
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

/** Layers with attention. Of a hybrid's other layers the config does not say how large a state is: they are left out, and that is said. */
function attentionLayers(
  name: string,
  layers: number,
  inner: TextConfig,
  assumed: string[],
): ReadonlySet<number> {
  const all = Array.from({ length: layers }, (_, index) => index);
  const { hybrid_override_pattern: pattern, layer_types: types } = inner;
  const attends = (index: number): boolean => {
    if (pattern != null) return pattern[index] === "*";
    const type = types?.[index];
    return type === undefined || (type.includes("attention") && type !== "linear_attention");
  };
  const held = all.filter(attends);
  // A layer of experts alone keeps nothing.
  const states =
    pattern == null ? layers - held.length : all.filter((index) => pattern[index] === "M").length;
  if (states > 0)
    assumed.push(
      `${name}: the states of ${states} state-space layers are left out, for the config does not give their sizes; --file or --from has them`,
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
