import type { EngineFlags } from "./engine-flags.js";
import { type Engine, enginesOf } from "./engine-settings.js";
import type { ModelSource } from "./model-source.js";
import type { Pair } from "./pair.js";
import { pairOfEngines } from "./pair-from-model.js";

/** The pair of two engines with these models, prefill's first, and settings. Errors: `KV_CONFIG_INVALID`, `KV_PLAN_*`. */
export function pairOfModels(models: readonly [ModelSource, ModelSource], flags: EngineFlags): Pair {
  const assumed: string[] = [];
  const [prefill, decode] = enginesOf(flags, assumed, models);
  const [prefillModel, decodeModel] = models;
  const names = [...new Set([prefillModel.name, decodeModel.name])].join(" / ");
  return {
    ...pairOfEngines({
      title: `${names}: prefill ${sizesOf(prefill)} → decode ${sizesOf(decode)}`,
      ...{ prefill, decode, assumed },
    }),
    plannedFrom: [...new Set([prefillModel.plannedFrom, decodeModel.plannedFrom])].join("; "),
    withTp: (side, tpSize) => {
      const tp = { prefill: prefill.tpSize, decode: decode.tpSize, [side]: tpSize };
      return pairOfModels(models, { ...flags, tp: [tp.prefill, tp.decode] });
    },
  };
}

function sizesOf({ tpSize, ppSize }: Engine): string {
  return ppSize === 1 ? `TP ${tpSize}` : `TP ${tpSize}, PP ${ppSize}`;
}
