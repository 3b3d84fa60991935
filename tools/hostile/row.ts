/** What came of one part of a run. */
export interface Row {
  /** What was tried, and on what. */
  readonly name: string;
  /** How often, how many, how much. */
  readonly tries: string;
  /** What was observed, with numbers. */
  readonly result: string;
  readonly ok: boolean;
}

/** What was observed, and whether it is as it must be. */
export type Check = readonly [observed: string, holds: boolean];

/** The row of what must hold at the end. What does not hold is marked. */
export function rowOf(name: string, tries: string, checks: readonly Check[]): Row {
  const result = checks.map(([observed, holds]) => (holds ? observed : `**${observed}**`));

  return { name, tries, result: result.join(", "), ok: checks.every(([, holds]) => holds) };
}

/** The row of a part that this machine cannot run. With CI=true it is a failure. */
export const skipped = (name: string, why: string): Row =>
  rowOf(name, "none", [[`SKIPPED: ${why}`, process.env.CI !== "true"]]);
