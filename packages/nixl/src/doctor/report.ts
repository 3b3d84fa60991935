import type { z } from "zod";
import { checkSchemaOf, checksText, reportOfChecks, reportSchemaOf } from "./check-report.js";

const AREAS = ["runtime", "library", "plugins", "machine", "variables", "pair"] as const;

const checkSchema = checkSchemaOf(AREAS, "machine.memlock or plugins.UCX");
/** One finding of the doctor: a stable `id`, its `area`, a `title`, a `status`, what was `found`, and perhaps a `fix` and `details`. */
export type Check = z.infer<typeof checkSchema>;

/** The zod schema of what `kv-nixl doctor --json` prints. */
export const doctorReportSchema = reportSchemaOf(checkSchema);
/** What `doctor` returns: `checks`, their `counts` by status, and the worst as the `verdict`. */
export type DoctorReport = z.infer<typeof doctorReportSchema>;

/** A report of these checks. */
export function doctorReport(checks: readonly Check[]): DoctorReport {
  return reportOfChecks(checks);
}

/** The report as text: one line for each check, with its fix below, and the verdict as the last line. */
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
