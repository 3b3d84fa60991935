import { checkSchemaOf, reportOfChecks, reportSchemaOf } from "@kv/nixl";
import type { z } from "zod";

const AREAS = ["prefill", "decode", "versions", "compatibility", "plan", "clocks", "bytes"] as const;

const checkSchema = checkSchemaOf(AREAS, "prefill.side-channel");
export type Check = z.infer<typeof checkSchema>;

/** What `kv-peer doctor --json` prints. */
export const pairReportSchema = reportSchemaOf(checkSchema);
export type PairReport = z.infer<typeof pairReportSchema>;

export function reportOf(checks: readonly Check[]): PairReport {
  return reportOfChecks(checks);
}
