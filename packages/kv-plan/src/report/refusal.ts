import { KvError } from "@kv/interface";
import { REPORT_VERSION, type RefusalReport } from "./report.js";

/** The report of a model or a pair that is refused. Throws any error that is no refusal. */
export function refusalOf(title: string, error: unknown, wouldWork: readonly string[]): RefusalReport {
  if (!KvError.is(error) || error.code !== "KV_PLAN_UNSUPPORTED") throw error;
  return {
    version: REPORT_VERSION,
    outcome: "refused",
    title,
    code: error.code,
    reason: error.message,
    hint: error.hint ?? null,
    details: error.details,
    wouldWork,
    assumed: [],
  };
}
