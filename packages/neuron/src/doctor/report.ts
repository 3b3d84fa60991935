import { checksText, doctorSchemas } from "@kv/program";
import type { z } from "zod";

const schemas = doctorSchemas(
  ["machine", "library", "runtime", "network"],
  "machine.devices or library.symbols",
);
/**
 * One finding of the doctor: a stable `id`, its `area`, a `title`, a `status`, what was `found`,
 * and perhaps a `fix` and `details`.
 */
export type Check = z.infer<typeof schemas.check>;

/** The zod schema of what `kv-neuron doctor --json` prints. */
export const doctorReportSchema = schemas.report;
/** What `doctor` returns: `checks`, their `counts` by status, and the worst as the `verdict`. */
export type DoctorReport = z.infer<typeof doctorReportSchema>;

/**
 * The report as text: one line for each check, with its fix below, and the verdict as the last
 * line.
 */
export function doctorText(report: DoctorReport): string {
  const { checks, counts } = report;
  return checksText(report, {
    ok: "no problem found",
    warn: `it works; ${counts.warn} of ${checks.length} checks suggest an improvement`,
    fail: `${counts.fail} of ${checks.length} checks failed; the simulated device works without them`,
  });
}
