import { cellBytes } from "../cache-spec.js";
import { divided, type Family, layersOf, type ModelContext, type ModelDraft } from "../model-draft.js";
import { denseLatentSpec, denseMlaBackend, latentSize } from "./latents.js";
import {
  GDN_CHECKPOINT_TOKENS,
  gatedDeltaNet,
  hybrid,
  kimiDelta,
  kindOfType,
  LATENT_HYBRID_TOKENS,
  mamba1,
  mamba2,
  recurrentDtype,
  type State,
  shortConvolution,
} from "./state-shapes.js";

/** Gated delta nets with a full layer among several (Qwen3-Next, Qwen3.5). */
export const deltaNets = (prefix: string): Family => ({
  name: "Qwen3-Next, Qwen3.5",
  read(context) {
    const { fields } = context;
    const layers = fields.layers("num_hidden_layers");
    const every = fields.count("full_attention_interval", 4);
    const types =
      fields.perLayer<string>("layer_types", "string", layers) ??
      Array.from({ length: layers }, (_, layer) =>
        (layer + 1) % every === 0 ? "full_attention" : "linear_attention",
      );
    return hybrid(context, layers, (layer) => [kindOfType(context, "layer_types", types[layer])], {
      state: gatedDeltaNet(context, recurrentDtype(context, "mamba_ssm_dtype", context.modelDtype)),
      attentionName: `${prefix}model.layers.*.self_attn.attn`,
      stateName: `${prefix}model.layers.*.linear_attn`,
      stateAlignment: GDN_CHECKPOINT_TOKENS,
    });
  },
});

/** Kimi delta attention, with latents in some layers (Kimi K3, Kimi Linear). */
export const kimiDeltas = (prefix: string): Family => ({
  name: "Kimi K3, Kimi Linear",
  read(context): ModelDraft {
    const { fields } = context;
    const layers = fields.layers("num_hidden_layers");
    divided(context, fields.count("num_attention_heads"), "attention heads");
    const linear = fields.object("linear_attn_config");
    if (linear === undefined) throw fields.unknownValue("linear_attn_config", null, "its sizes are needed");
    const deltas = linear.value("kda_layers");
    if (!Array.isArray(deltas)) throw linear.unknownValue("kda_layers", deltas, "a list of layers is needed");
    linear.ignore("full_attn_layers", "gate_lower_bound", "use_full_rank_gate");
    fields.ignore("mla_use_nope", "mla_use_output_gate");
    const size = latentSize(fields);
    const latent = denseLatentSpec(context, size);
    const state = kimiDelta(context, {
      heads: linear.count("num_heads"),
      headSize: linear.count("head_dim"),
      kernel: linear.count("short_conv_kernel_size"),
      dtype: recurrentDtype(context, undefined, "float32"),
    });
    linear.refuseUnread(context.architecture);
    return {
      numLayers: layers,
      numKvHeads: 1,
      backends: [denseMlaBackend(context)],
      layout: "LBNHC",
      tokenBytes: cellBytes({ ...latent, blockSize: 1 }),
      leastBlockTokens: LATENT_HYBRID_TOKENS,
      layers: layersOf(layers, (layer) => ({
        // The number of a layer in this list is one more.
        [`${prefix}model.layers.*.self_attn`]: deltas.includes(layer + 1) ? state : latent,
      })),
    };
  },
});

/** Jamba: Mamba 1, with attention in one layer of a period. */
export const jamba: Family = {
  name: "Jamba",
  read(context) {
    const { fields } = context;
    const layers = fields.layers("num_hidden_layers");
    const [period, offset] = [
      fields.count("attn_layer_period", 8),
      fields.optionalCount("attn_layer_offset") ?? 4,
    ];
    fields.ignore("layers_block_type", "layer_types");
    const state = mamba1(
      context,
      fields.count("mamba_expand", 2) * fields.count("hidden_size"),
      fields.count("mamba_d_state", 16),
      fields.count("mamba_d_conv", 4),
      recurrentDtype(context, undefined, context.modelDtype),
    );
    return hybrid(context, layers, (layer) => [layer % period === offset ? "attention" : "state"], {
      state,
      attentionName: "model.layers.*.attn",
      stateName: "model.layers.*.mixer",
    });
  },
};

/** LFM2: short convolutions, with attention in some layers. */
export const shortConvolutions = (prefix: string): Family => ({
  name: "LFM2",
  read(context) {
    const { fields } = context;
    const layers = fields.layers("num_hidden_layers");
    const types = fields.perLayer<string>("layer_types", "string", layers);
    const full = fields.value("full_attn_idxs");
    const isFull = (layer: number) =>
      types === undefined
        ? !Array.isArray(full) || full.includes(layer)
        : kindOfType(context, "layer_types", types[layer]) === "attention";
    fields.ignore("conv_dim_out", "block_dim", "num_heads");
    const channels = fields.optionalCount("conv_dim") ?? fields.count("hidden_size");
    return hybrid(context, layers, (layer) => [isFull(layer) ? "attention" : "state"], {
      state: shortConvolution(context, channels, fields.count("conv_L_cache", 3)),
      attentionName: `${prefix}layers.*.self_attn.attn`,
      stateName: `${prefix}layers.*.short_conv`,
    });
  },
});

/** States in every layer, and no attention (Mamba, Falcon Mamba): no block size has to fit one. */
export const mambaOnly = (family: string, stateOf: (context: ModelContext) => State): Family => ({
  name: family,
  read(context): ModelDraft {
    const layers = context.fields.layers(["num_hidden_layers", "n_layer"]);
    const state = stateOf(context);
    return {
      ...{ numLayers: layers, numKvHeads: 1, backends: [], tokenBytes: 0 },
      layers: layersOf(layers, () => ({ "backbone.layers.*.mixer": state })),
    };
  },
});

/** The state of Mamba 1, with the names of its own config. */
export function mamba1State(context: ModelContext): State {
  const { fields } = context;
  fields.ignore("expand", "time_step_rank", "use_conv_bias", "layer_types", "d_inner", "conv_bias");
  return mamba1(
    context,
    fields.count("intermediate_size", fields.count("expand", 2) * fields.count(["hidden_size", "d_model"])),
    fields.count("state_size", 16),
    fields.count("conv_kernel", 4),
    recurrentDtype(context, undefined, context.modelDtype),
  );
}

/** The state of Mamba 2, with the names of its own config. */
export function mamba2State(context: ModelContext): State {
  const { fields } = context;
  fields.ignore("time_step_rank", "use_conv_bias", "layer_types", "intermediate_size");
  return mamba2(context, {
    heads: fields.count("num_heads"),
    headSize: fields.count("head_dim"),
    inner: fields.count("expand", 2) * fields.count("hidden_size"),
    stateSize: fields.count("state_size"),
    groups: fields.count("n_groups"),
    kernel: fields.count("conv_kernel", 4),
    dtype: recurrentDtype(context, undefined, context.modelDtype),
  });
}
