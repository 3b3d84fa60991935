import { expect, test } from "vitest";
import { mt19937 } from "./torch-random.js";

test("gives the numbers of the reference generator", () => {
  // The C++ standard prescribes the 10000th number of the default seed, 5489.
  const random = mt19937(5489);
  expect([random.next(), random.next()]).toEqual([3499211612, 581869302]);
  for (let i = 2; i < 9999; i++) random.next();
  expect(random.next()).toBe(4123659995);
});

test.each([0, 1, 623, 624, 625, 1248, 2500])(
  "skip(%i) has the effect of as many draws",
  (count) => {
    const [drawn, skipped] = [mt19937(1), mt19937(1)];
    for (const start of [0, 5]) {
      for (let i = 0; i < start + count; i++) drawn.next();
      for (let i = 0; i < start; i++) skipped.next();
      skipped.skip(count);
      expect(skipped.next()).toBe(drawn.next());
    }
  },
);
