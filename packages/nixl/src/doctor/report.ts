import { checksText } from "@kv/program";
import type { DoctorReport } from "../reports.js";

/** The report as text: a line per check, its fix below, the verdict last. */
export function doctorText(report: DoctorReport): string {
  const { checks, counts } = report;
  const first = checks.find(({ status, fix }) => status === "fail" && fix !== undefined)?.fix;
  const begin = first === undefined ? "" : `; first: ${first}`;
  return checksText(report, {
    ok: "no problems found",
    warn: `it works; ${counts.warn} of ${checks.length} checks suggest an improvement`,
    fail: `${counts.fail} of ${checks.length} checks failed${begin}`,
  });
}
