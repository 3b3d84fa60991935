import fc from "fast-check";

/** A part of a whole, from 0 to 1, each as likely as another. (`fc.double` draws among all doubles: nearly all are next to 0.) */
export const share: fc.Arbitrary<number> = fc.nat({ max: 1000 }).map((thousandth) => thousandth / 1000);
