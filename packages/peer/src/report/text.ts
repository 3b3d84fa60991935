import type { PairReport } from "./check.js";

const INDENT = "      ";

/** A line for each check, its fix below it, and the verdict at the end. */
export function reportText({ checks, counts, verdict }: PairReport): string {
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
  const summary = {
    ok: "this pair can work",
    warn: `this pair can work; ${counts.warn} of ${checks.length} checks say what to look at`,
    fail: `this pair cannot work: ${counts.fail} of ${checks.length} checks failed`,
  };
  return `${lines.join("\n")}\n\n${verdict}: ${summary[verdict]}\n`;
}
