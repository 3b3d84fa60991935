// A long suite: a benchmark's own test.
import { expect, it } from "vitest";
import { GROUPS, runGroup } from "./index.js";
import { growthExponent, TOLERANCE } from "./measure.js";

const SIZES = [100, 1000, 10_000, 100_000];
const exponentOf = (cost: (size: number) => number) => growthExponent(SIZES, SIZES.map(cost));

it("the exponent of growth is the power of the size that the cost follows", () => {
  expect(exponentOf(() => 7)).toBeCloseTo(0);
  expect(exponentOf((size) => 3 * size)).toBeCloseTo(1);
  expect(exponentOf((size) => 0.1 * size ** 1.5)).toBeCloseTo(1.5);
});

it("finds growth that a fixed cost, or a cost that falls at first, hides at small sizes", () => {
  expect(exponentOf((size) => 100 + 0.01 * size)).toBeGreaterThan(TOLERANCE);
  expect(growthExponent(SIZES, [50, 10, 11, 100])).toBeGreaterThan(TOLERANCE);
});

it("stays within the tolerance where caches get colder", () => {
  expect(growthExponent(SIZES, [1, 1.1, 1.4, 2.6])).toBeLessThan(TOLERANCE);
  expect(exponentOf((size) => Math.log2(size))).toBeLessThan(TOLERANCE);
});

it.each(GROUPS)(
  "the group %s measures all of its costs, and ends",
  async (name) => {
    const { missing, curves } = await runGroup(name, ["--trial"]);
    if (missing !== undefined) return;
    expect(curves.length).toBeGreaterThan(0);
    for (const { costs } of curves) expect(costs[0]).toBeGreaterThan(0);
  },
  120_000,
);
