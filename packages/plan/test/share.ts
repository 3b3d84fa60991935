import fc from "fast-check";

/**
 * A uniform share from 0 to 1. (`fc.double` draws uniformly among all doubles: nearly all are close
 * to 0.)
 */
export const share: fc.Arbitrary<number> = fc
  .nat({ max: 1000 })
  .map((thousandth) => thousandth / 1000);
