/** `npm test` has a short form of suites that repeat or combine much. */
export const isLongRun = process.env["KV_LONG"] === "1" || process.env["CI"] === "true";

export function someOf<T>(cases: readonly T[], each: number): T[] {
  return cases.filter((_, at) => isLongRun || at % each === 0);
}
