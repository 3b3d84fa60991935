import { KvError } from "@kv/interface";
import { type RefusalReport, refusalReport } from "../report/report.js";
import { suggestSizes } from "../report/suggestions.js";
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
    changed: (other) => pairOfModels(models, { ...flags, ...other }),
  };
}

/**
 * The pair, or the report of a refusal: of a model that is not understood, and of a TP size that vLLM refuses, with the sizes that would work. `models` may throw.
 * Errors: `KV_CONFIG_INVALID`, other `KV_PLAN_*`.
 */
export function pairOrRefusal(
  title: string,
  models: () => readonly [ModelSource, ModelSource],
  flags: EngineFlags,
): Pair | RefusalReport {
  let known: readonly [ModelSource, ModelSource] | undefined;
  try {
    known = models();
    return pairOfModels(known, flags);
  } catch (error) {
    if (!KvError.is(error) || error.code !== "KV_PLAN_UNSUPPORTED") throw error;
    // A model that is not understood has no TP size that would work.
    const understood = known;
    const wouldWork =
      understood === undefined
        ? []
        : suggestSizes(flags.tp, (tp) => pairOfModels(understood, { ...flags, tp }));
    return refusalReport(title, error, { wouldWork, assumed: [] });
  }
}

function sizesOf({ tpSize, ppSize }: Engine): string {
  return ppSize === 1 ? `TP ${tpSize}` : `TP ${tpSize}, PP ${ppSize}`;
}
