/** All suites run, in their long form. */
export const isWhole: boolean;
