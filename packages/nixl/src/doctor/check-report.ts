import { z } from "zod";

const STATUSES = ["ok", "note", "warn", "fail"] as const;
const VERDICTS = ["ok", "warn", "fail"] as const;

export type Verdict = (typeof VERDICTS)[number];

/** A check of a doctor whose checks belong to these areas. */
export function checkSchemaOf<const Area extends string>(areas: readonly Area[], exampleId: string) {
  return z.object({
    id: z.string().describe(`Stable name, such as ${exampleId}.`),
    area: z.enum(areas),
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
}

/** What a doctor prints with `--json`. */
export function reportSchemaOf<C extends z.ZodType>(check: C) {
  return z.object({
    version: z.literal(1),
    verdict: z.enum(VERDICTS).describe("The worst of the checks."),
    counts: z.object({ ok: z.int(), note: z.int(), warn: z.int(), fail: z.int() }),
    checks: z.array(check),
  });
}

/** What every doctor's report has, whatever its areas. */
export interface CheckReport<C> {
  readonly version: 1;
  readonly verdict: Verdict;
  readonly counts: { ok: number; note: number; warn: number; fail: number };
  readonly checks: C[];
}

interface AnyCheck {
  readonly area: string;
  readonly title: string;
  readonly status: (typeof STATUSES)[number];
  readonly found: string;
  readonly fix?: string | undefined;
}

/** The checks counted, and the worst of them as the verdict. */
export function reportOfChecks<C extends AnyCheck>(checks: readonly C[]): CheckReport<C> {
  const counts = { ok: 0, note: 0, warn: 0, fail: 0 };
  for (const { status } of checks) counts[status] += 1;
  const verdict = counts.fail > 0 ? "fail" : counts.warn > 0 ? "warn" : "ok";
  return { version: 1, verdict, counts, checks: [...checks] };
}

const INDENT = "      ";

/** A line for each check, its fix below it, and the verdict at the end in the words of `summary`. */
export function checksText(
  { checks, verdict }: CheckReport<AnyCheck>,
  summary: Readonly<Record<Verdict, string>>,
): string {
  const width = Math.max(0, ...checks.map(({ title }) => title.length));
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
  return `${lines.join("\n")}\n\n${verdict}: ${summary[verdict]}\n`;
}
