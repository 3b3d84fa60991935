import { checksText } from "@kv/program";
import { doctorSchemas } from "@kv/program/doctor-schemas";
import type { z } from "zod";

const schemas = doctorSchemas(
  ["machine", "library", "runtime", "network"],
  "machine.devices or library.symbols",
);
/**
 * One finding: a stable `id`, its `area`, `title`, `status`, what was `found`, and perhaps a `fix`
 * and `details`.
 */
export type Check = z.infer<typeof schemas.check>;

/** The zod schema of `kv-neuron doctor --json`. */
export const doctorReportSchema = schemas.report;
/** What `doctor` returns: `checks`, `counts` by status, and the worst as the `verdict`. */
export type DoctorReport = z.infer<typeof doctorReportSchema>;

/** A line per check, its fix below, and the verdict last. */
export function doctorText(report: DoctorReport): string {
  const { checks, counts } = report;
  return checksText(report, {
    ok: "no problem found",
    warn: `it works; ${counts.warn} of ${checks.length} checks suggest an improvement`,
    fail: `${counts.fail} of ${checks.length} checks failed; the simulated device works without them`,
  });
}
