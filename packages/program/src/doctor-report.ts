import { z } from "zod";
import { print, printJson } from "./print.js";
import { EXIT_CODES } from "./run-program.js";

const STATUSES = ["ok", "note", "warn", "fail"] as const;
const VERDICTS = ["ok", "warn", "fail"] as const;

/**
 * The zod schemas of a doctor's checks and of its report, as it prints it with `--json`. `areas`
 * are the groups of checks; `exampleId` is for the description of `id`.
 */
export function doctorSchemas<const Area extends string>(
  areas: readonly Area[],
  exampleId: string,
) {
  const check = z.object({
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
    details: z
      .record(z.string(), z.unknown())
      .optional()
      .describe("The finding in a form for programs."),
  });
  const report = z.object({
    version: z.literal(1),
    verdict: z.enum(VERDICTS).describe("The worst of the checks; a note counts as ok."),
    counts: z.object({ ok: z.int(), note: z.int(), warn: z.int(), fail: z.int() }),
    checks: z.array(check),
  });
  return { check, report };
}

interface AnyCheck {
  readonly area: string;
  readonly title: string;
  readonly status: (typeof STATUSES)[number];
  readonly found: string;
  readonly fix?: string | undefined;
}

/** The report of a doctor. */
interface AnyReport<C extends AnyCheck> {
  readonly version: 1;
  readonly verdict: (typeof VERDICTS)[number];
  readonly counts: Record<AnyCheck["status"], number>;
  readonly checks: C[];
}

/** A report of checks, with their counts and the verdict. */
export function reportOfChecks<C extends AnyCheck>(checks: readonly C[]): AnyReport<C> {
  const counts = { ok: 0, note: 0, warn: 0, fail: 0 };
  for (const { status } of checks) counts[status] += 1;
  const verdict = counts.fail > 0 ? "fail" : counts.warn > 0 ? "warn" : "ok";
  return { version: 1, verdict, counts, checks: [...checks] };
}

const INDENT = "      ";

/**
 * A report as text: one line for each check, its fix below, and at the end the verdict with its
 * text of `summary`.
 */
export function checksText(
  { checks, verdict }: AnyReport<AnyCheck>,
  summary: Readonly<Record<(typeof VERDICTS)[number], string>>,
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

/**
 * Prints a doctor's report, as `text` or as JSON. The program's exit code is 1 when a check failed.
 */
export function printDoctorReport<C extends AnyCheck>(
  report: AnyReport<C>,
  {
    json,
    text,
  }: { readonly json: boolean | undefined; readonly text: (report: AnyReport<C>) => string },
): void {
  if (json === true) printJson(report);
  else print(text(report));
  if (report.verdict === "fail") process.exitCode = EXIT_CODES.failed;
}
