const STATUSES = ["ok", "note", "warn", "fail"] as const;

/** One line of the doctor's report. The form is that of `kv-nixl doctor`. */
export interface Check {
  /** Stable name, such as `machine.devices` or `library.symbols`. */
  readonly id: string;
  readonly area: "machine" | "library" | "runtime" | "network";
  readonly title: string;
  /** ok; note: a fact that is neither good nor bad; warn: it works, worse than it could; fail: it does not work. */
  readonly status: (typeof STATUSES)[number];
  /** What was found, for people. */
  readonly found: string;
  /** What to do about it. */
  readonly fix?: string;
  /** The same for programs. */
  readonly details?: Readonly<Record<string, unknown>>;
}

/** What `kv-neuron doctor --json` prints. */
export interface DoctorReport {
  readonly version: 1;
  /** The worst of the checks. */
  readonly verdict: "ok" | "warn" | "fail";
  readonly counts: Readonly<Record<Check["status"], number>>;
  readonly checks: readonly Check[];
}

export function reportOf(checks: readonly Check[]): DoctorReport {
  const counts = { ok: 0, note: 0, warn: 0, fail: 0 };
  for (const { status } of checks) counts[status] += 1;
  const verdict = counts.fail > 0 ? "fail" : counts.warn > 0 ? "warn" : "ok";
  return { version: 1, verdict, counts, checks };
}

const INDENT = "      ";

/** A line for each check, its fix below it, and the verdict at the end. */
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
    ok: "everything is as it should be",
    warn: `it works; ${counts.warn} of ${checks.length} checks say how it could be better`,
    fail: `${counts.fail} of ${checks.length} checks failed; the simulated device needs none of this`,
  };
  return `${lines.join("\n")}\n\n${verdict}: ${summary[verdict]}\n`;
}
