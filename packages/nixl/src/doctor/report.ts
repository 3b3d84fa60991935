import type { z } from "zod";
import { checkSchemaOf, checksText, reportOfChecks, reportSchemaOf } from "./check-report.js";

const AREAS = ["runtime", "library", "plugins", "machine", "variables", "pair"] as const;

const checkSchema = checkSchemaOf(AREAS, "machine.memlock or plugins.UCX");
export type Check = z.infer<typeof checkSchema>;

/** What `kv-nixl doctor --json` prints. */
export const doctorReportSchema = reportSchemaOf(checkSchema);
export type DoctorReport = z.infer<typeof doctorReportSchema>;

export function reportOf(checks: readonly Check[]): DoctorReport {
  return reportOfChecks(checks);
}

export function reportText(report: DoctorReport): string {
  const { checks, counts } = report;
  const first = checks.find(({ status, fix }) => status === "fail" && fix !== undefined)?.fix;
  const begin = first === undefined ? "" : `; begin with: ${first}`;
  return checksText(report, {
    ok: "everything is as it should be",
    warn: `it works; ${counts.warn} of ${checks.length} checks say how it could be better`,
    fail: `${counts.fail} of ${checks.length} checks failed${begin}`,
  });
}
