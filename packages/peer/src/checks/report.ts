import { checksText, warningsText } from "@kv/program";
import { doctorSchemas } from "@kv/program/doctor-schemas";
import type { z } from "zod";

/** A server's role in a pair: P computes the prompt, D receives its KV. */
export type Role = "prefill" | "decode";
export const ROLES: readonly Role[] = ["prefill", "decode"];

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

/** One finding: a stable id that begins with its area, a status, what was found, and what to do. */
export type Check = z.infer<typeof schemas.check>;

/** What `kv-peer doctor --json` and `kv-peer verify --json` print. */
export const reportSchema = schemas.report;

/** All checks, their counts, and the worst status as the verdict. */
export type Report = z.infer<typeof reportSchema>;

export type CheckParts = [
  title: string,
  status: Check["status"],
  found: string,
  fix?: string,
  details?: Check["details"],
];

export function check(
  id: `${Area}.${string}`,
  ...[title, status, found, fix, details]: CheckParts
): Check {
  return { id, area: id.split(".")[0] as Area, title, status, found, fix, details };
}

/** A line per check, its fix below, and the verdict last. */
export function reportText(report: Report): string {
  const { checks, counts } = report;
  return checksText(report, {
    ok: "this pair can work",
    warn: `this pair can work; ${warningsText(report)}`,
    fail: `this pair cannot work: ${counts.fail} of ${checks.length} checks failed`,
  });
}

/** As `reportText`, with a verdict that names what failed. */
export function verifyText(report: Report): string {
  const { checks } = report;
  const failed = checks.filter(({ status }) => status === "fail").map(({ id }) => id);
  return checksText(report, {
    ok: "this deployment is disaggregated, and nothing was found wrong with it",
    warn: `this deployment is disaggregated; ${warningsText(report)}`,
    fail: failed.join(", "),
  });
}
