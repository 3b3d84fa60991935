/**
 * True in CI and in `npm run test:long -- --only whole`: suites run in their long form. `npm test`
 * runs a short form of those that repeat or combine much.
 */
export const isLongRun = process.env["KV_LONG"] === "1" || process.env["CI"] === "true";

/** All cases in the long form; in the short form the first of every `each`. */
export function someOf<T>(cases: readonly T[], each: number): T[] {
  return cases.filter((_, at) => isLongRun || at % each === 0);
}
