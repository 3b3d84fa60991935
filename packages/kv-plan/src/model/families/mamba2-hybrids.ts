import type { Family, ModelContext } from "../model-draft.js";
import { hybrid, kindOfType, mamba2, recurrentDtype, type State } from "./state-hybrids.js";

/** Nemotron-H: one letter per layer, M for Mamba 2, * for attention, others without a cache. */
export const nemotronH: Family = {
  name: "Nemotron-H",
  read(context) {
    const { fields } = context;
    const letters = nemotronLetters(context);
    const state = mamba2(context, {
      heads: fields.count("mamba_num_heads"),
      headSize: fields.count("mamba_head_dim"),
      stateSize: fields.count(["ssm_state_size", "mamba_state_dim"]),
      groups: fields.count(["mamba_n_groups", "n_groups"]),
      kernel: fields.count(["mamba_d_conv", "conv_kernel"]),
      dtype: recurrentDtype(context, "mamba_ssm_cache_dtype", "float32"),
    });
    fields.ignore("mamba_expand", "layer_types", "attention_head_dim");
    const kinds = { M: ["state"], "*": ["attention"], "-": [], E: [] } as const;
    // The pattern counts the layers, whatever num_hidden_layers says.
    return hybrid(context, letters.length, (layer) => kinds[letters[layer] ?? "-"], {
      state,
      attentionName: "model.layers.*.mixer.attn",
      stateName: "model.layers.*.mixer",
    });
  },
};

type NemotronLetter = "M" | "*" | "-" | "E";
const NEMOTRON_TYPES: Readonly<Record<string, NemotronLetter>> = {
  mamba: "M",
  linear_attention: "M",
  attention: "*",
  full_attention: "*",
  mlp: "-",
  moe: "E",
};

function nemotronLetters({ fields }: ModelContext): readonly NemotronLetter[] {
  const field = fields.has("layers_block_type") ? "layers_block_type" : "hybrid_override_pattern";
  const pattern = fields.value(field);
  const entries = typeof pattern === "string" ? [...pattern] : pattern;
  fields.ignore("hybrid_override_pattern");
  if (!Array.isArray(entries) || entries.length === 0 || entries.length > 10_000)
    throw fields.unknownValue(field, pattern, "a letter or a type for each layer is needed");
  return entries.map((entry: unknown) => {
    const letter = typeof entry === "string" ? (NEMOTRON_TYPES[entry] ?? entry) : "";
    if (letter === "M" || letter === "*" || letter === "-" || letter === "E") return letter;
    throw fields.unknownValue(
      field,
      [entry],
      "M, *, - and E (mamba, attention, mlp, moe) are known",
    );
  });
}

/** Bamba's fields, as in Falcon-H1 and Granite 4. `inner`: elements of x. */
function stateOfBamba(context: ModelContext, inner: number): State {
  const { fields } = context;
  const heads = fields.count("mamba_n_heads");
  const headSize =
    fields.value("mamba_d_head") === "auto" ? inner / heads : fields.count("mamba_d_head");
  if (heads * headSize !== inner)
    throw fields.unknownValue(
      "mamba_d_head",
      headSize,
      `vLLM refuses ${heads} heads that do not make up ${inner} channels`,
    );
  return mamba2(context, {
    heads,
    headSize,
    inner,
    stateSize: fields.count("mamba_d_state"),
    groups: fields.count("mamba_n_groups"),
    kernel: fields.count("mamba_d_conv"),
    dtype: recurrentDtype(context, undefined, context.modelDtype),
  });
}

/** Falcon-H1: attention and Mamba 2 in every layer. States are numbered after all attention. */
export const falconH1: Family = {
  name: "Falcon-H1",
  read(context) {
    const { fields } = context;
    const layers = fields.layers("num_hidden_layers");
    const inner =
      fields.optionalCount("mamba_d_ssm") ??
      Math.floor(fields.number("mamba_expand", 2) * fields.count("hidden_size"));
    fields.ignore("mamba_expand", "attn_layer_indices", "layer_types", "layers_block_type");
    const state = stateOfBamba(context, inner);
    const draft = hybrid(context, layers, () => ["attention", "state"], {
      state,
      attentionName: "model.layers.*.attn",
      stateName: "model.*.mixer",
    });
    const named = draft.layers.map((each) =>
      "mambaType" in each.spec ? { ...each, name: `model.${layers + each.layer}.mixer` } : each,
    );
    return { ...draft, layers: named };
  },
};

/** Granite 4: Mamba 2 in most layers. */
export const graniteHybrid: Family = {
  name: "Granite 4",
  read(context) {
    const { fields } = context;
    const layers = fields.layers("num_hidden_layers");
    const types =
      fields.perLayer<string>("layer_types", "string", layers) ??
      fields.perLayer<string>("layers_block_type", "string", layers);
    if (types === undefined)
      throw fields.unknownValue("layer_types", null, "the type of each layer is needed");
    const inner = fields.count("mamba_expand", 2) * fields.count("hidden_size");
    const state = stateOfBamba(context, inner);
    return hybrid(context, layers, (layer) => [kindOfType(context, "layer_types", types[layer])], {
      state,
      attentionName: "model.layers.*.self_attn.attn",
      stateName: "model.layers.*.mixer",
    });
  },
};

/** Zamba 2: Mamba 2 in every layer, and attention with double-size heads in some. */
export const zamba2: Family = {
  name: "Zamba 2",
  read(context) {
    const { fields } = context;
    const layers = fields.layers("num_hidden_layers");
    const types = fields.perLayer<string>("layers_block_type", "string", layers);
    if (types === undefined)
      throw fields.unknownValue("layers_block_type", null, "the type of each layer is needed");
    const ids = fields.value("hybrid_layer_ids");
    const hybrids = types.flatMap((type, layer) => (type === "hybrid" ? [layer] : []));
    if (ids !== undefined && JSON.stringify(ids) !== JSON.stringify(hybrids))
      throw fields.unknownValue(
        "hybrid_layer_ids",
        ids,
        "the layers that layers_block_type calls hybrid are known",
      );
    const hidden = fields.count("hidden_size");
    const inner = fields.count("mamba_expand", 2) * hidden;
    const heads = fields.count(["n_mamba_heads"]);
    fields.ignore("attention_head_dim", "attention_hidden_size");
    const said = fields.optionalCount("mamba_headdim");
    if (said !== undefined && said * heads !== inner)
      throw fields.unknownValue(
        "mamba_headdim",
        said,
        `vLLM takes pages for these, and ${heads} heads of ${inner} channels for states`,
      );
    fields.ignore("num_query_groups", "kv_channels", "use_shared_attention_adapter");
    fields.ignore("use_shared_mlp_adapter", "head_dim");
    const state = mamba2(context, {
      heads,
      inner,
      headSize: Math.floor(inner / heads),
      stateSize: fields.count("mamba_d_state"),
      groups: fields.count("mamba_ngroups"),
      kernel: fields.count("mamba_d_conv"),
      dtype: recurrentDtype(context, undefined, context.modelDtype),
    });
    const headSize = (2 * hidden) / fields.count("num_attention_heads");
    const kindsOf = (layer: number) => {
      const type = types[layer];
      if (type !== "hybrid" && type !== "mamba" && type !== "linear_attention")
        throw fields.unknownValue("layers_block_type", [type], "hybrid and mamba are known");
      return type === "hybrid" ? (["attention", "state"] as const) : (["state"] as const);
    };
    const draft = hybrid(context, layers, kindsOf, {
      state,
      headSize,
      attentionName: "model.attn.*",
      stateName: "*.mixer",
    });
    // vLLM makes all attention first, and numbers the kinds one after the other.
    const attention = draft.layers.filter(({ spec }) => !("mambaType" in spec));
    const states = draft.layers.filter(({ spec }) => "mambaType" in spec);
    return {
      ...draft,
      layers: [
        ...attention.map((each, index) => ({ ...each, name: `model.attn.${index}` })),
        ...states.map((each) => ({ ...each, name: `${attention.length + each.layer}.mixer` })),
      ],
    };
  },
};
