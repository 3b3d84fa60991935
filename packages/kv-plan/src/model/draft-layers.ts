import { KvError } from "@kv/interface";
import type { DraftMethod, LearnedArchitecture } from "./architectures.js";
import { isRecord, OTHER_WAYS } from "./config-fields.js";
import type { LayerDraft, ModelContext, ModelDraft } from "./model-draft.js";

/** What vLLM serves beside a model, so that it guesses tokens (`--speculative-config`). */
export interface DraftModel {
  /** An EAGLE head's config.json; without one, the checkpoint's layers of multi-token prediction. */
  readonly config?: unknown;
  /** vLLM's `num_speculative_tokens`. */
  readonly tokens: number;
}

/** Heads with layers of Llama. */
const HEADS: Readonly<Record<string, DraftMethod>> = {
  EagleLlamaForCausalLM: "eagle",
  Eagle3LlamaForCausalLM: "eagle3",
  LlamaForCausalLMEagle3: "eagle3",
};

/** The architecture whose rules a head's layers follow. */
export const HEAD_LAYERS = "LlamaForCausalLM";

/** @throws `KV_PLAN_UNSUPPORTED` for a draft that vLLM was not asked with beside this model. */
export function methodOf(
  { name, architecture }: ModelContext,
  { config }: DraftModel,
  learned: LearnedArchitecture,
): DraftMethod {
  const said = isRecord(config) ? config["architectures"] : undefined;
  const head = Array.isArray(said) ? String(said[0]) : undefined;
  const method = config === undefined ? "mtp" : HEADS[head ?? ""];
  if (method === undefined)
    throw unknown(`${name}: a draft with the architecture ${head ?? "that its file lacks"}`);
  if (learned.drafts?.includes(method) === true) return method;
  throw unknown(`${name}: ${architecture} with a draft by the method ${method}`);
}

function unknown(what: string): KvError {
  return new KvError("KV_PLAN_UNSUPPORTED", `${what} is not known`, { hint: OTHER_WAYS });
}

/**
 * How many layers of multi-token prediction the checkpoint has.
 * @throws `KV_PLAN_UNSUPPORTED` for a count of tokens that vLLM refuses.
 */
export function predictionLayers({ name, fields }: ModelContext, { tokens }: DraftModel): number {
  const layers = fields.count("num_nextn_predict_layers");
  if (tokens <= layers || tokens % layers === 0) return layers;
  throw new KvError(
    "KV_PLAN_UNSUPPORTED",
    `${name}: ${tokens} draft tokens are no multiple of the ${layers} layers that guess them: vLLM refuses them`,
  );
}

/** The model's layers, and after them those of its draft, whose numbers go on. */
export function besideTarget(target: ModelDraft, draft: ModelDraft): ModelDraft {
  const renumbered = draft.layers.map((each): LayerDraft => {
    const layer = each.layer + target.numLayers;
    return { ...each, layer, name: each.name.replace(`.${each.layer}.`, `.${layer}.`) };
  });
  const names = new Set(target.backends.map(({ name }) => name));
  return {
    ...target,
    numLayers: target.numLayers + draft.numLayers,
    layers: [...target.layers, ...renumbered],
    backends: [...target.backends, ...draft.backends.filter(({ name }) => !names.has(name))],
  };
}
