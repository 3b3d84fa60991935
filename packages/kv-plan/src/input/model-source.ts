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

/** A model whose caches are known for any settings of an engine. */
export interface ModelSource {
  readonly name: string;
  /** The source of the rules, as the report prints it. */
  readonly plannedFrom: string;
  /** Whether layers have states. */
  readonly hasStates: boolean;
  /** @throws The errors of `modelCaches`. */
  caches(settings: Pick<CacheSettings, "tpSize" | "blockSize" | "layout">): ModelCaches;
}

/** The settings of caches that both engines have in common. */
export type CacheTypes = Pick<CacheSettings, "cacheDtype" | "stateDtype" | "prefixCaching">;

/**
 * The model of a `config.json`.
 * @throws The errors of `modelCaches` for one rank.
 */
export function modelOfConfig(name: string, config: unknown, types: CacheTypes = {}): ModelSource {
  const { architecture, family, stateBlockSize } = modelCaches(name, config, {
    ...types,
    tpSize: 1,
  });
  return {
    name,
    hasStates: stateBlockSize !== undefined,
    plannedFrom: `vLLM 0.33's rules for ${architecture} (${family}), on an H100`,
    caches: (settings) => modelCaches(name, config, { ...types, ...settings }),
  };
}

/** A model by its numbers: layers that are all alike. */
export interface ShapeByHand {
  readonly layers: number;
  readonly kvHeads: number;
  /** Elements of a head, or of a latent. */
  readonly headSize: number;
  readonly isMla: boolean;
  readonly cacheDtype: string;
}

/** The model that flags describe. */
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

/**
 * Refuses two models whose caches differ.
 * @throws `KV_PLAN_INCOMPATIBLE` with the fact and both values.
 */
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
