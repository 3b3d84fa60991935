import type { EngineFlags } from "./engine-flags.js";
import { settingsOf } from "./engine-settings.js";
import type { ModelShape } from "./model-shape.js";
import type { EngineSettings, Pair } from "./pair.js";
import { pairFromModels } from "./pair-from-model.js";

/** The pair of two engines with these models, prefill's first, and settings. Errors: `KV_CONFIG_INVALID`, `KV_PLAN_*`. */
export function pairOfModels(
  [prefillModel, decodeModel]: readonly [ModelShape, ModelShape],
  flags: EngineFlags,
): Pair {
  const assumed: string[] = [];
  const [prefill, decode] = settingsOf(flags, assumed, prefillModel);
  const names = [...new Set([prefillModel.name, decodeModel.name])].join(" / ");
  const title = `${names}: prefill ${sizesOf(prefill)} → decode ${sizesOf(decode)}`;
  return pairFromModels({ title, prefillModel, decodeModel, prefill, decode, assumed });
}

function sizesOf({ tpSize, ppSize }: EngineSettings): string {
  return ppSize === 1 ? `TP ${tpSize}` : `TP ${tpSize}, PP ${ppSize}`;
}
