export interface Row {
  readonly name: string;
  readonly tries: string;
  readonly result: string;
  readonly ok: boolean;
}

/** What was observed, and whether it is as it must be. */
export type Check = readonly [observed: string, holds: boolean];

/** What does not hold is marked. */
export function rowOf(name: string, tries: string, checks: readonly Check[]): Row {
  const result = checks.map(([observed, holds]) => (holds ? observed : `**${observed}**`));

  return { name, tries, result: result.join(", "), ok: checks.every(([, holds]) => holds) };
}

/** With CI=true it is a failure. */
export const skipped = (name: string, why: string): Row =>
  rowOf(name, "none", [[`SKIPPED: ${why}`, process.env.CI !== "true"]]);
