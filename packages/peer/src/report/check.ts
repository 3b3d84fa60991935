import { z } from "zod";

const STATUSES = ["ok", "note", "warn", "fail"] as const;

const AREAS = ["prefill", "decode", "versions", "compatibility", "plan", "clocks", "bytes"] as const;

const checkSchema = z.object({
  id: z.string().describe("Stable name, such as prefill.side-channel."),
  area: z.enum(AREAS),
  title: z.string(),
  status: z
    .enum(STATUSES)
    .describe(
      "ok; note: a fact that is neither good nor bad; warn: it works, worse than it could; fail: it does not work.",
    ),
  found: z.string().describe("What was found, for people."),
  fix: z.string().optional().describe("What to do about it."),
  details: z.record(z.string(), z.unknown()).optional().describe("The same for programs."),
});
export type Check = z.infer<typeof checkSchema>;

/** What `kv-peer doctor --json` prints. */
export const pairReportSchema = z.object({
  version: z.literal(1),
  verdict: z.enum(["ok", "warn", "fail"]).describe("The worst of the checks."),
  counts: z.object({ ok: z.int(), note: z.int(), warn: z.int(), fail: z.int() }),
  checks: z.array(checkSchema),
});
export type PairReport = z.infer<typeof pairReportSchema>;

export function reportOf(checks: readonly Check[]): PairReport {
  const counts = { ok: 0, note: 0, warn: 0, fail: 0 };
  for (const { status } of checks) counts[status] += 1;
  const verdict = counts.fail > 0 ? "fail" : counts.warn > 0 ? "warn" : "ok";
  return { version: 1, verdict, counts, checks: [...checks] };
}
