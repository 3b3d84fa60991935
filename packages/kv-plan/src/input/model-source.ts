import { KvError } from "@kv/interface";
import { elementsOf } from "../model/cache-dtype.js";
import {
  type CacheSettings,
  cachesOfDraft,
  DEFAULT_MAX_TOKENS,
  type ModelCaches,
  modelCaches,
} from "../model/model-caches.js";
import { divided, FLASH_ATTN, headsOfRank, type ModelContext } from "../model/model-draft.js";

/** A model whose caches are known for any engine settings. */
export interface ModelSource {
  readonly name: string;
  readonly plannedFrom: string;
  readonly hasStates: boolean;
  /** @throws The errors of `modelCaches`. */
  caches(settings: Pick<CacheSettings, "tpSize" | "blockSize" | "layout">): ModelCaches;
}

export type CacheTypes = Pick<
  CacheSettings,
  "cacheDtype" | "stateDtype" | "prefixCaching" | "draft"
>;

/** @throws The errors of `modelCaches` for one rank. */
export function modelOfConfig(name: string, config: unknown, types: CacheTypes = {}): ModelSource {
  const { architecture, family, stateBlockSize } = modelCaches(name, config, {
    ...types,
    tpSize: 1,
  });
  return {
    name,
    hasStates: stateBlockSize !== undefined,
    plannedFrom: `vLLM 0.33's rules for ${architecture} (${family})${types.draft === undefined ? "" : " with a draft"}, on an H100`,
    caches: (settings) => modelCaches(name, config, { ...types, ...settings }),
  };
}

/** A model of equal layers. */
export interface ShapeByHand {
  readonly layers: number;
  readonly kvHeads: number;
  /** Elements of a head or a latent. */
  readonly headSize: number;
  readonly isMla: boolean;
  readonly cacheDtype: string;
}

export function modelByHand(shape: ShapeByHand): ModelSource {
  const { layers, kvHeads, headSize, isMla, cacheDtype } = shape;
  return {
    name: "model",
    hasStates: false,
    plannedFrom: "the flags: layers that are all alike",
    caches(settings) {
      const context: Omit<ModelContext, "fields" | "outer"> = {
        name: "model",
        architecture: "none",
        modelDtype: "bfloat16",
        cacheDtype,
        stateDtype: "auto",
        tpSize: settings.tpSize,
        prefixCaching: true,
        assumed: cacheDtype === "auto" ? ["dtype bfloat16"] : [],
        shapes: {},
      };
      if (!isMla && settings.tpSize < kvHeads) divided(context, kvHeads, "KV heads");
      const spec = {
        class: isMla ? ("MLAAttentionSpec" as const) : ("FullAttentionSpec" as const),
        numKvHeads: isMla ? 1 : headsOfRank(context, kvHeads),
        ...(isMla ? {} : { modelKvHeads: kvHeads }),
        headSize,
        headSizeV: isMla ? 0 : headSize,
        ...elementsOf(context, headSize, isMla ? 0 : headSize),
      };
      return cachesOfDraft(
        context,
        {
          numLayers: layers,
          numKvHeads: isMla ? 1 : kvHeads,
          backends: [
            isMla ? { name: "FLASHMLA", kernelTokens: 1 } : { ...FLASH_ATTN, kernelTokens: 1 },
          ],
          layers: Array.from({ length: layers }, (_, layer) => ({
            name: `model.layers.${layer}.self_attn.attn`,
            layer,
            spec,
          })),
        },
        {
          family: "layers by hand",
          blockSize: settings.blockSize,
          layout: settings.layout,
          maxTokens: DEFAULT_MAX_TOKENS,
        },
      );
    },
  };
}

/** @throws `KV_PLAN_INCOMPATIBLE` with the fact in which the models differ. */
export function requireEqualModels(prefill: ModelCaches, decode: ModelCaches): void {
  const facts = ({ numKvHeads, layers }: ModelCaches) => ({
    "KV heads": numKvHeads,
    "layers with a cache": layers.length,
    "kinds of the layers": layers.map(({ spec }) => spec.class).join(" "),
    "bytes of a head and token": layers
      .map(({ spec }) =>
        spec.class === "MambaSpec"
          ? spec.dtypes.join("+")
          : (spec.contentBytes ??
            `${spec.modelKvHeads ?? 1}x${spec.headSize}+${spec.headSizeV} ${spec.dtype}`),
      )
      .join(" "),
  });
  const [one, other] = [facts(prefill), facts(decode)];
  for (const key of Object.keys(one) as (keyof typeof one)[]) {
    if (one[key] === other[key]) continue;
    const short = (value: string | number) =>
      String(value).length > 60 ? `${String(value).slice(0, 60)}…` : value;
    throw new KvError(
      "KV_PLAN_INCOMPATIBLE",
      `the two models differ in ${key}: prefill ${short(one[key])}, decode ${short(other[key])}`,
      {
        hint: "both engines must run one model with one --kv-cache-dtype",
        details: { what: key, prefill: one[key], decode: other[key] },
      },
    );
  }
}
