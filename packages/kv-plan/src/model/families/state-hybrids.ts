import { KvError } from "@kv/interface";
import { cellBytes, dtypeBytes, type MambaSpec } from "../cache-spec.js";
import {
  divided,
  type Family,
  FLASH_ATTN,
  headsOfRank,
  layersOf,
  type ModelContext,
  type ModelDraft,
} from "../model-draft.js";
import { attentionSpec, headShapeOf } from "./attention.js";
import { denseLatentSpec, denseMlaBackend, latentSize } from "./latents.js";

export type State = Omit<MambaSpec, "blockSize" | "pageSizePadded">;

/**
 * With prefix caching, gated delta nets' blocks are multiples of these tokens, where FlashInfer's
 * H100 prefill exports states.
 */
const GDN_CHECKPOINT_TOKENS = 64;
/** Beside latents, vLLM's blocks of states are multiples of these tokens. */
const LATENT_HYBRID_TOKENS = 128;

/**
 * The given type, else the config's, else the model's.
 * @throws `KV_CONFIG_INVALID`.
 */
export function recurrentDtype(
  context: ModelContext,
  field: string | undefined,
  otherwise: string,
): string {
  const configured = field === undefined ? undefined : context.fields.text(field);
  const said = context.stateDtype === "auto" ? configured : context.stateDtype;
  const dtype = said === undefined || said === "auto" ? otherwise : said;
  if (dtypeBytes(dtype) > 1) return dtype;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${context.name}: a state of type "${dtype}"; bfloat16, float16 and float32 are known`,
    { hint: "give it with --ssm-dtype" },
  );
}

/** Mamba 2: the convolution's x, B and C, and each head's recurrent state. */
export function mamba2(
  context: ModelContext,
  sizes: {
    readonly heads: number;
    readonly headSize: number;
    readonly stateSize: number;
    readonly groups: number;
    readonly kernel: number;
    readonly inner?: number;
    readonly dtype: string;
  },
): State {
  const { heads, headSize, stateSize, groups, kernel, inner = heads * headSize, dtype } = sizes;
  const { tpSize } = context;
  // Each rank holds the one group that cannot be divided among ranks.
  const held = groups === 1 ? tpSize : groups;
  if (groups !== 1) divided(context, groups, "groups of a state's projections");
  return {
    class: "MambaSpec",
    mambaType: "MAMBA2",
    checkpointBlocks: 1,
    shapes: [
      [
        convolutionRows(context, kernel),
        divided(context, inner + 2 * held * stateSize, "channels of a convolution"),
      ],
      [divided(context, heads, "heads of a state"), headSize, stateSize],
    ],
    dtypes: [context.modelDtype, dtype],
  };
}

/** A convolution keeps the inputs before a token, and those that a draft guesses. */
function convolutionRows({ draftTokens = 0 }: ModelContext, kernel: number): number {
  return kernel - 1 + draftTokens;
}

function mamba1(
  context: ModelContext,
  inner: number,
  stateSize: number,
  kernel: number,
  recurrent: string,
): State {
  const channels = divided(context, inner, "channels of a state");
  return {
    class: "MambaSpec",
    mambaType: "MAMBA1",
    shapes: [
      [kernel - 1, channels],
      [channels, stateSize],
    ],
    dtypes: [context.modelDtype, recurrent],
  };
}

/** A gated delta net: the convolution's Q, K and V, and a matrix per value head. */
function gatedDeltaNet(context: ModelContext, recurrent: string): State {
  const { fields } = context;
  const [keyHeads, valueHeads] = [
    fields.count("linear_num_key_heads"),
    fields.count("linear_num_value_heads"),
  ];
  const [keySize, valueSize] = [
    fields.count("linear_key_head_dim"),
    fields.count("linear_value_head_dim"),
  ];
  divided(context, keyHeads, "key heads of a delta net");
  return {
    class: "MambaSpec",
    mambaType: "GDN_ATTN",
    shapes: [
      [
        convolutionRows(context, fields.count("linear_conv_kernel_dim")),
        divided(
          context,
          2 * keyHeads * keySize + valueHeads * valueSize,
          "channels of a convolution",
        ),
      ],
      [divided(context, valueHeads, "value heads of a delta net"), valueSize, keySize],
    ],
    dtypes: [context.modelDtype, recurrent],
  };
}

export function hybrid(
  context: ModelContext,
  layers: number,
  cachesOf: (layer: number) => readonly ("attention" | "state")[],
  given: {
    readonly state: State;
    readonly attentionName: string;
    readonly stateName: string;
    readonly stateAlignment?: number;
    readonly headSize?: number;
  },
): ModelDraft {
  const shape = headShapeOf(context);
  const spec = attentionSpec(context, { ...shape, headSize: given.headSize ?? shape.headSize });
  const bytes = headsOfRank(context, shape.kvHeads) * cellBytes({ ...spec, blockSize: 1 });
  const kindsOf = Array.from({ length: layers }, (_, layer) => cachesOf(layer));
  return {
    numLayers: layers,
    numKvHeads: shape.kvHeads,
    backends: [FLASH_ATTN],
    // Without attention, no page of it measures a state.
    tokenBytes: kindsOf.some((kinds) => kinds.includes("attention")) ? bytes : 0,
    ...(given.stateAlignment === undefined ? {} : { stateAlignment: given.stateAlignment }),
    layers: layersOf(layers, (layer) => {
      const kinds = kindsOf[layer] ?? [];
      return {
        ...(kinds.includes("attention") && { [given.attentionName]: spec }),
        ...(kinds.includes("state") && { [given.stateName]: given.state }),
      };
    }),
  };
}

const STATE_TYPES = new Set(["linear_attention", "mamba", "mamba2", "conv", "short_conv"]);
const ATTENTION_TYPES = new Set(["full_attention", "attention", "indexed_attention"]);

export function kindOfType(
  { fields }: ModelContext,
  field: string,
  type: string | undefined,
): "attention" | "state" {
  if (type !== undefined && STATE_TYPES.has(type)) return "state";
  if (type !== undefined && ATTENTION_TYPES.has(type)) return "attention";
  throw fields.unknownValue(
    field,
    [type],
    `${[...ATTENTION_TYPES, ...STATE_TYPES].join(", ")} are known`,
  );
}

/** Gated delta nets with some full layers. `checkpoints`: a prefill fills blocks with states. */
const deltaNetsOf = (name: string, checkpoints: boolean): Family => ({
  name,
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
      state: {
        ...gatedDeltaNet(context, recurrentDtype(context, "mamba_ssm_dtype", context.modelDtype)),
        ...(checkpoints ? { checkpointBlocks: 1 } : {}),
      },
      attentionName: "model.layers.*.self_attn.attn",
      stateName: "model.layers.*.linear_attn",
      ...(checkpoints ? { stateAlignment: GDN_CHECKPOINT_TOKENS } : {}),
    });
  },
});

export const deltaNets = deltaNetsOf("Qwen3-Next, Qwen3.5", true);
export const olmoHybrid = deltaNetsOf("OLMo Hybrid", false);

/** Kimi delta attention, with latents in some layers (Kimi K3, Kimi Linear). */
export const kimiDeltas: Family = {
  name: "Kimi K3, Kimi Linear",
  read(context): ModelDraft {
    const { fields } = context;
    const layers = fields.layers("num_hidden_layers");
    divided(context, fields.count("num_attention_heads"), "attention heads");
    const linear = fields.object("linear_attn_config");
    if (linear === undefined)
      throw fields.unknownValue("linear_attn_config", null, "its sizes are needed");
    const deltas = linear.value("kda_layers");
    if (!Array.isArray(deltas))
      throw linear.unknownValue("kda_layers", deltas, "a list of layers is needed");
    linear.ignore("full_attn_layers");
    fields.ignore("mla_use_nope");
    const size = latentSize(fields);
    const latent = denseLatentSpec(context, size);
    const [heads, headSize] = [linear.count("num_heads"), linear.count("head_dim")];
    const kernel = linear.count("short_conv_kernel_size");
    const dtype = recurrentDtype(context, undefined, "float32");
    const state: State = {
      class: "MambaSpec",
      mambaType: "GDN_ATTN",
      shapes: [
        [
          convolutionRows(context, kernel),
          divided(context, 3 * heads * headSize, "channels of a convolution"),
        ],
        [divided(context, heads, "heads of a delta net"), headSize, headSize],
      ],
      dtypes: [context.modelDtype, dtype],
    };
    linear.refuseUnread(context.architecture);
    return {
      numLayers: layers,
      numKvHeads: 1,
      backends: [denseMlaBackend(context, size)],
      layout: "LBNHC",
      tokenBytes: cellBytes({ ...latent, blockSize: 1 }),
      leastBlockTokens: LATENT_HYBRID_TOKENS,
      layers: layersOf(layers, (layer) => ({
        // This list counts layers from 1.
        ["model.layers.*.self_attn"]: deltas.includes(layer + 1) ? state : latent,
      })),
    };
  },
};

/** Jamba: Mamba 1, with one attention layer per period. */
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
export const shortConvolutions: Family = {
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
    fields.ignore("num_heads");
    const kernel = fields.count("conv_L_cache", 3);
    if (kernel === 1) throw fields.unknownValue("conv_L_cache", kernel, "it leaves no state");
    const channels = fields.optionalCount("conv_dim") ?? fields.count("hidden_size");
    return hybrid(context, layers, (layer) => [isFull(layer) ? "attention" : "state"], {
      state: {
        class: "MambaSpec",
        mambaType: "SHORT_CONV",
        dtypes: [context.modelDtype],
        shapes: [
          [
            convolutionRows(context, kernel),
            divided(context, channels, "channels of a convolution"),
          ],
        ],
      },
      attentionName: "model.layers.*.self_attn.attn",
      stateName: "model.layers.*.short_conv",
    });
  },
};

/** States in every layer (Mamba, Falcon Mamba): no block size must fit attention. */
export const mambaOnly = (family: string, stateOf: (context: ModelContext) => State): Family => ({
  name: family,
  read(context): ModelDraft {
    const layers = context.fields.layers(["num_hidden_layers", "n_layer"]);
    const state = stateOf(context);
    return {
      numLayers: layers,
      numKvHeads: 1,
      backends: [],
      tokenBytes: 0,
      layers: layersOf(layers, () => ({ "backbone.layers.*.mixer": state })),
    };
  },
});

export function mamba1State(context: ModelContext): State {
  const { fields } = context;
  fields.ignore("layer_types");
  return mamba1(
    context,
    fields.count(
      "intermediate_size",
      fields.count("expand", 2) * fields.count(["hidden_size", "d_model"]),
    ),
    fields.count("state_size", 16),
    fields.count("conv_kernel", 4),
    recurrentDtype(context, undefined, context.modelDtype),
  );
}

export function mamba2State(context: ModelContext): State {
  const { fields } = context;
  fields.ignore("layer_types");
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
