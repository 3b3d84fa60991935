import { checksText, doctorSchemas } from "@kv/program";
import type { z } from "zod";

const schemas = doctorSchemas(
  ["runtime", "library", "plugins", "machine", "variables", "pair"],
  "machine.memlock or plugins.UCX",
);
/**
 * One finding of the doctor: a stable `id`, its `area`, a `title`, a `status`, what was `found`,
 * and perhaps a `fix` and `details`.
 */
export type Check = z.infer<typeof schemas.check>;

/** The zod schema of what `kv-nixl doctor --json` prints. */
export const doctorReportSchema = schemas.report;
/** What `doctor` returns: `checks`, their `counts` by status, and the worst as the `verdict`. */
export type DoctorReport = z.infer<typeof doctorReportSchema>;

/**
 * The report as text: one line for each check, with its fix below, and the verdict as the last
 * line.
 */
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
