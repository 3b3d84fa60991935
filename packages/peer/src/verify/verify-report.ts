import { checksText, doctorSchemas } from "@kv/program";
import type { z } from "zod";

const schemas = doctorSchemas(
  ["requests", "transfer", "lane", "blocks", "tokens"],
  "transfer.recomputed or lane.tcp-instead-of-rdma",
);

/**
 * One finding of `verify`: a stable id, which names the fault, an area, a status, what was found,
 * and what to do about it.
 */
export type VerifyCheck = z.infer<typeof schemas.check>;

/** The JSON that `kv-peer verify --json` prints. */
export const verifyReportSchema = schemas.report;

/** The report of `verify`: all checks, their counts, and the worst status as the verdict. */
export type VerifyReport = z.infer<typeof verifyReportSchema>;

/**
 * The report as text: one line per check, its fix below it, and the verdict with the names of what
 * failed.
 */
export function verifyText(report: VerifyReport): string {
  const failed = report.checks.filter(({ status }) => status === "fail").map(({ id }) => id);
  return checksText(report, {
    ok: "this deployment is disaggregated, and nothing was found wrong with it",
    warn: `this deployment is disaggregated; ${report.counts.warn} of ${report.checks.length} checks are warnings`,
    fail: failed.join(", "),
  });
}
