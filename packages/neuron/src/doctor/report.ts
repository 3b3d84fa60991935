const STATUSES = ["ok", "note", "warn", "fail"] as const;

/** One line of the doctor's report, in the form of `kv-nixl doctor`. */
export interface Check {
  /** Stable name, such as `machine.devices` or `library.symbols`. */
  readonly id: string;
  /** Group of checks. */
  readonly area: "machine" | "library" | "runtime" | "network";
  /** Short title. */
  readonly title: string;
  /** `note` is a neutral fact; `warn` means that it works worse than it could; `fail` means that it does not work. */
  readonly status: (typeof STATUSES)[number];
  /** Finding, as text for people. */
  readonly found: string;
  /** Remedy. Absent where there is nothing to do. */
  readonly fix?: string | undefined;
  /** Finding, as data for programs. */
  readonly details?: Readonly<Record<string, unknown>> | undefined;
}

/** Report of `doctor`, and output of `kv-neuron doctor --json`. */
export interface DoctorReport {
  /** Version of this form. */
  readonly version: 1;
  /** The worst status of the checks; `note` counts as `ok`. */
  readonly verdict: "ok" | "warn" | "fail";
  /** Number of checks by status. */
  readonly counts: Readonly<Record<Check["status"], number>>;
  /** The checks, in the order of the printed report. */
  readonly checks: readonly Check[];
}

export function reportOf(checks: readonly Check[]): DoctorReport {
  const counts = { ok: 0, note: 0, warn: 0, fail: 0 };
  for (const { status } of checks) counts[status] += 1;
  const verdict = counts.fail > 0 ? "fail" : counts.warn > 0 ? "warn" : "ok";
  return { version: 1, verdict, counts, checks };
}

const INDENT = "      ";

/** Formats a report for a terminal: one line for each check with its fix below, then the verdict. */
export function doctorText({ checks, counts, verdict }: DoctorReport): string {
  const width = Math.max(...checks.map(({ title }) => title.length));
  const lines: string[] = [];
  let area = "";
  for (const check of checks) {
    if (check.area !== area) {
      area = check.area;
      lines.push(...(lines.length > 0 ? [""] : []), area);
    }
    lines.push(`${check.status.padEnd(4)}  ${check.title.padEnd(width)}  ${check.found}`);
    if (check.fix !== undefined) lines.push(`${INDENT}fix: ${check.fix}`);
  }
  const summary = {
    ok: "no problem found",
    warn: `it works; ${counts.warn} of ${checks.length} checks suggest an improvement`,
    fail: `${counts.fail} of ${checks.length} checks failed; the simulated device works without them`,
  };
  return `${lines.join("\n")}\n\n${verdict}: ${summary[verdict]}\n`;
}
