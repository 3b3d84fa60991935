import { z } from "zod";

const STATUSES = ["ok", "note", "warn", "fail"] as const;

const checkSchema = z.object({
  id: z.string().describe("Stable name, such as machine.memlock or plugin.UCX."),
  area: z.enum(["runtime", "library", "plugins", "machine", "variables", "pair"]),
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

/** What `kv-nixl doctor --json` prints. */
export const doctorReportSchema = z.object({
  version: z.literal(1),
  verdict: z.enum(["ok", "warn", "fail"]).describe("The worst of the checks."),
  counts: z.object({ ok: z.int(), note: z.int(), warn: z.int(), fail: z.int() }),
  checks: z.array(checkSchema),
});
export type DoctorReport = z.infer<typeof doctorReportSchema>;

export function reportOf(checks: readonly Check[]): DoctorReport {
  const counts = { ok: 0, note: 0, warn: 0, fail: 0 };
  for (const { status } of checks) counts[status] += 1;
  const verdict = counts.fail > 0 ? "fail" : counts.warn > 0 ? "warn" : "ok";
  return { version: 1, verdict, counts, checks: [...checks] };
}

const INDENT = "      ";

/** A line for each check, its fix below it, and the verdict at the end. */
export function reportText({ checks, counts, verdict }: DoctorReport): string {
  const width = Math.max(...checks.map(({ title }) => title.length));
  const lines: string[] = [];
  let area = "";
  for (const check of checks) {
    if (check.area !== area) {
      area = check.area;
      lines.push(...(lines.length > 0 ? [""] : []), area);
    }
    const [first = "", ...more] = check.found.split("\n");
    lines.push(`${check.status.padEnd(4)}  ${check.title.padEnd(width)}  ${first}`);
    lines.push(...more.map((line) => `${INDENT}${" ".repeat(width)}  ${line.trim()}`));
    if (check.fix !== undefined) lines.push(`${INDENT}fix: ${check.fix}`);
  }
  const summary = {
    ok: "everything is as it should be",
    warn: `it works; ${counts.warn} of ${checks.length} checks say how it could be better`,
    fail: `${counts.fail} of ${checks.length} checks failed`,
  };
  return `${lines.join("\n")}\n\n${verdict}: ${summary[verdict]}\n`;
}
