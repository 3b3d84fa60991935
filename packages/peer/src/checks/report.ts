import { checksText, doctorSchemas } from "@kv/program";
import type { z } from "zod";

/** Which server of a pair: P computes the prompt, D receives its KV. */
export type Role = "prefill" | "decode";

const AREAS = [
  "prefill",
  "decode",
  "versions",
  "compatibility",
  "plan",
  "clocks",
  "bytes",
  "requests",
  "transfer",
  "lane",
  "blocks",
  "tokens",
  "watch",
] as const;
type Area = (typeof AREAS)[number];

const schemas = doctorSchemas(AREAS, "prefill.side-channel or transfer.recomputed");

/**
 * One finding: a stable id, which begins with its area, a status, what was found, and what to do
 * about it.
 */
export type Check = z.infer<typeof schemas.check>;

/** The JSON that `kv-peer doctor --json` and `kv-peer verify --json` print. */
export const reportSchema = schemas.report;

/** A report: all checks, their counts, and the worst status as the verdict. */
export type Report = z.infer<typeof reportSchema>;

/** A check whose area is what its id begins with. */
export function check(
  id: `${Area}.${string}`,
  title: string,
  status: Check["status"],
  found: string,
  more: Pick<Check, "fix" | "details"> = {},
): Check {
  return { id, area: id.split(".")[0] as Area, title, status, found, ...more };
}

/**
 * The report of `pairDoctor` as text: one line per check, its fix below it, and the verdict in the
 * last line.
 */
export function reportText(report: Report): string {
  const { checks, counts } = report;
  return checksText(report, {
    ok: "this pair can work",
    warn: `this pair can work; ${counts.warn} of ${checks.length} checks are warnings`,
    fail: `this pair cannot work: ${counts.fail} of ${checks.length} checks failed`,
  });
}

/** The report of `verify` as text. The verdict has the names of what failed. */
export function verifyText(report: Report): string {
  const { checks, counts } = report;
  const failed = checks.filter(({ status }) => status === "fail").map(({ id }) => id);
  return checksText(report, {
    ok: "this deployment is disaggregated, and nothing was found wrong with it",
    warn: `this deployment is disaggregated; ${counts.warn} of ${checks.length} checks are warnings`,
    fail: failed.join(", "),
  });
}
