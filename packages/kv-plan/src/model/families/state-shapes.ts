import { KvError } from "@kv/interface";
import { cellBytes, dtypeBytes, type MambaSpec } from "../cache-spec.js";
import {
  divided,
  FLASH_ATTN,
  headsOfRank,
  layersOf,
  type ModelContext,
  type ModelDraft,
} from "../model-draft.js";
import { attentionSpec, headShapeOf } from "./attention.js";

export type State = Omit<MambaSpec, "blockSize" | "pageSizePadded">;

/** Blocks of gated delta nets begin at multiples of these tokens with prefix caching: FlashInfer's prefill of an H100 exports states there. */
export const GDN_CHECKPOINT_TOKENS = 64;
/** Of states beside latents vLLM makes blocks of a multiple of these tokens. */
export const LATENT_HYBRID_TOKENS = 128;

/** The type of the recurrent state: what is asked for, what the config says, or the model's. Errors: `KV_CONFIG_INVALID`. */
export function recurrentDtype(context: ModelContext, field: string | undefined, otherwise: string): string {
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

/** Mamba 2: projections x, B and C of the convolution, and the recurrent state of each head. */
export function mamba2(
  context: ModelContext,
  sizes: {
    readonly heads: number;
    readonly headSize: number;
    readonly stateSize: number;
    readonly groups: number;
    readonly kernel: number;
    readonly inner?: number;
    /** Type of the recurrent state. */
    readonly dtype: string;
  },
): State {
  const { heads, headSize, stateSize, groups, kernel, inner = heads * headSize, dtype } = sizes;
  const { tpSize } = context;
  // Groups that ranks cannot share out are held by each of them.
  const held = groups % tpSize === 0 ? groups : Math.max(groups, tpSize);
  if (groups % tpSize !== 0 && groups > tpSize) divided(context, groups, "groups of a state's projections");
  return {
    class: "MambaSpec",
    mambaType: "MAMBA2",
    shapes: [
      [kernel - 1, divided(context, inner + 2 * held * stateSize, "channels of a convolution")],
      [divided(context, heads, "heads of a state"), headSize, stateSize],
    ],
    dtypes: [context.modelDtype, dtype],
  };
}

export function mamba1(
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

/** A gated delta net: projections Q, K and V of the convolution, and a matrix for each value head. */
export function gatedDeltaNet(context: ModelContext, recurrent: string): State {
  const { fields } = context;
  const [keyHeads, valueHeads] = [
    fields.count("linear_num_key_heads"),
    fields.count("linear_num_value_heads"),
  ];
  const [keySize, valueSize] = [fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")];
  divided(context, keyHeads, "key heads of a delta net");
  return {
    class: "MambaSpec",
    mambaType: "GDN_ATTN",
    shapes: [
      [
        fields.count("linear_conv_kernel_dim") - 1,
        divided(context, 2 * keyHeads * keySize + valueHeads * valueSize, "channels of a convolution"),
      ],
      [divided(context, valueHeads, "value heads of a delta net"), valueSize, keySize],
    ],
    dtypes: [context.modelDtype, recurrent],
  };
}

/** Kimi delta attention: projections of the convolution, and a matrix for each head. */
export function kimiDelta(
  context: ModelContext,
  sizes: {
    readonly heads: number;
    readonly headSize: number;
    readonly kernel: number;
    readonly dtype: string;
  },
): State {
  const { heads, headSize, kernel, dtype } = sizes;
  return {
    class: "MambaSpec",
    mambaType: "GDN_ATTN",
    shapes: [
      [kernel - 1, divided(context, 3 * heads * headSize, "channels of a convolution")],
      [divided(context, heads, "heads of a delta net"), headSize, headSize],
    ],
    dtypes: [context.modelDtype, dtype],
  };
}

/** A short convolution has no recurrent state. */
export function shortConvolution(context: ModelContext, channels: number, kernel: number): State {
  return {
    class: "MambaSpec",
    mambaType: "SHORT_CONV",
    shapes: [[kernel - 1, divided(context, channels, "channels of a convolution")]],
    dtypes: [context.modelDtype],
  };
}

/** A hybrid: attention in some layers, states in others. */
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
  return {
    numLayers: layers,
    numKvHeads: shape.kvHeads,
    backends: [FLASH_ATTN],
    tokenBytes: headsOfRank(context, shape.kvHeads) * cellBytes({ ...spec, blockSize: 1 }),
    ...(given.stateAlignment === undefined ? {} : { stateAlignment: given.stateAlignment }),
    layers: layersOf(layers, (layer) => {
      const kinds = cachesOf(layer);
      return {
        ...(kinds.includes("attention") && { [given.attentionName]: spec }),
        ...(kinds.includes("state") && { [given.stateName]: given.state }),
      };
    }),
  };
}

const STATE_TYPES = new Set(["linear_attention", "mamba", "mamba2", "conv", "short_conv"]);
const ATTENTION_TYPES = new Set(["full_attention", "attention"]);

export function kindOfType(
  { fields }: ModelContext,
  field: string,
  type: string | undefined,
): "attention" | "state" {
  if (type !== undefined && STATE_TYPES.has(type)) return "state";
  if (type !== undefined && ATTENTION_TYPES.has(type)) return "attention";
  throw fields.unknownValue(field, [type], `${[...ATTENTION_TYPES, ...STATE_TYPES].join(", ")} are known`);
}
