import { print, printJson, terminalColumns } from "./print.js";
import { EXIT_CODES } from "./run-program.js";

/** How a check ends. */
export const STATUSES = ["ok", "note", "warn", "fail"] as const;
/** How a report ends. */
export const VERDICTS = ["ok", "warn", "fail"] as const;

interface AnyCheck {
  readonly area: string;
  readonly title: string;
  readonly status: (typeof STATUSES)[number];
  readonly found: string;
  readonly fix?: string | undefined;
}

interface AnyReport<C extends AnyCheck> {
  readonly version: 1;
  readonly verdict: (typeof VERDICTS)[number];
  readonly counts: Record<AnyCheck["status"], number>;
  readonly checks: C[];
}

/** Adds counts and the verdict to checks. */
export function reportOfChecks<C extends AnyCheck>(checks: readonly C[]): AnyReport<C> {
  const counts = { ok: 0, note: 0, warn: 0, fail: 0 };
  for (const { status } of checks) counts[status] += 1;
  const verdict = counts.fail > 0 ? "fail" : counts.warn > 0 ? "warn" : "ok";
  return { version: 1, verdict, counts, checks: [...checks] };
}

/** Such as `1 of 33 checks is a warning`. */
export function warningsText({ counts, checks }: AnyReport<AnyCheck>): string {
  const { warn } = counts;
  return `${warn} of ${checks.length} checks ${warn === 1 ? "is a warning" : "are warnings"}`;
}

const INDENT = "      ";
/** Text in fewer columns is not readable. */
const LEAST_COLUMNS = 30;

/**
 * A line per check, its fix below, and the verdict last. In a terminal, lines are cut between words
 * at its width.
 */
export function checksText(
  { checks, verdict }: AnyReport<AnyCheck>,
  summary: Readonly<Record<(typeof VERDICTS)[number], string>>,
  columns: number | undefined = terminalColumns(),
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
    const below = `${INDENT}${" ".repeat(width)}  `;
    const begin = `${check.status.padEnd(4)}  ${check.title.padEnd(width)}  `;
    lines.push(...wrapped(first, begin, below, columns));
    for (const line of more) lines.push(...wrapped(line.trim(), below, below, columns));
    if (check.fix !== undefined)
      lines.push(...wrapped(check.fix, `${INDENT}fix: `, `${INDENT}     `, columns));
  }
  return `${lines.join("\n")}\n\n${wrapped(summary[verdict], `${verdict}: `, INDENT, columns).join("\n")}\n`;
}

function wrapped(
  text: string,
  begin: string,
  below: string,
  columns = Number.POSITIVE_INFINITY,
): string[] {
  const most = Math.max(LEAST_COLUMNS, columns - below.length);
  const lines = [""];
  for (const word of text.split(" ")) {
    const last = lines.at(-1) ?? "";
    if (last === "") lines[lines.length - 1] = word;
    else if (last.length + 1 + word.length <= most) lines[lines.length - 1] = `${last} ${word}`;
    else lines.push(word);
  }
  return lines.map((line, index) => `${index === 0 ? begin : below}${line}`);
}

/** Sets the exit code 1 when a check failed. */
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
