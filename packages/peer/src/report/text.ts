import { checksText } from "@kv/nixl";
import type { PairReport } from "./check.js";

export function reportText(report: PairReport): string {
  const { checks, counts } = report;
  return checksText(report, {
    ok: "this pair can work",
    warn: `this pair can work; ${counts.warn} of ${checks.length} checks say what to look at`,
    fail: `this pair cannot work: ${counts.fail} of ${checks.length} checks failed`,
  });
}
