import { z } from "zod";

const STATUSES = ["ok", "note", "warn", "fail"] as const;
const VERDICTS = ["ok", "warn", "fail"] as const;

/** The worst status in a report; a note counts as ok. */
export type Verdict = (typeof VERDICTS)[number];

/** The zod schema of a check. `areas` are the groups in which a doctor reports; `exampleId` is for the description of `id`. */
export function checkSchemaOf<const Area extends string>(areas: readonly Area[], exampleId: string) {
  return z.object({
    id: z.string().describe(`Stable name, such as ${exampleId}.`),
    area: z.enum(areas),
    title: z.string(),
    status: z
      .enum(STATUSES)
      .describe(
        "ok; note: a fact that is neither good nor bad; warn: it works, but worse than it could; fail: it does not work.",
      ),
    found: z.string().describe("What was found, for people."),
    fix: z.string().optional().describe("How to fix it."),
    details: z.record(z.string(), z.unknown()).optional().describe("The finding in a form for programs."),
  });
}

/** The zod schema of a report, as a doctor prints it with `--json`. `check` is the schema of its checks. */
export function reportSchemaOf<C extends z.ZodType>(check: C) {
  return z.object({
    version: z.literal(1),
    verdict: z.enum(VERDICTS).describe("The worst of the checks."),
    counts: z.object({ ok: z.int(), note: z.int(), warn: z.int(), fail: z.int() }),
    checks: z.array(check),
  });
}

/** The report of a doctor. */
export interface CheckReport<C> {
  /** Version of this format. */
  readonly version: 1;
  /** The worst status of all checks. */
  readonly verdict: Verdict;
  /** How many checks have each status. */
  readonly counts: { ok: number; note: number; warn: number; fail: number };
  /** The checks, grouped by area. */
  readonly checks: C[];
}

interface AnyCheck {
  readonly area: string;
  readonly title: string;
  readonly status: (typeof STATUSES)[number];
  readonly found: string;
  readonly fix?: string | undefined;
}

/** A report of checks, with their counts and the verdict. */
export function reportOfChecks<C extends AnyCheck>(checks: readonly C[]): CheckReport<C> {
  const counts = { ok: 0, note: 0, warn: 0, fail: 0 };
  for (const { status } of checks) counts[status] += 1;
  const verdict = counts.fail > 0 ? "fail" : counts.warn > 0 ? "warn" : "ok";
  return { version: 1, verdict, counts, checks: [...checks] };
}

const INDENT = "      ";

/** A report as text: one line for each check, its fix below, and at the end the verdict with its text of `summary`. */
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
