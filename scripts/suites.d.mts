/** All suites run, in their long form. */
export const isWhole: boolean;
/** Suites that npm test leaves out when none of the files that `inputs` takes has changed. */
export const BY_INPUTS: readonly {
  readonly name: string;
  readonly suites: readonly string[];
  readonly inputs: readonly RegExp[];
}[];
