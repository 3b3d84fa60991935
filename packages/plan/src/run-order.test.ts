import fc from "fast-check";
import { expect, test } from "vitest";
import { countRuns, orderForRuns } from "./run-order.js";

const pairs = fc
  .uniqueArray(fc.tuple(fc.nat(60), fc.nat(60)), { selector: ([local]) => local, maxLength: 40 })
  .map(
    (list) =>
      [Int32Array.from(list, ([local]) => local), Int32Array.from(list, ([, remote]) => remote)] as const,
  );

test("pairs stay pairs, and no order has fewer runs", () => {
  fc.assert(
    fc.property(pairs, ([local, remote]) => {
      const before = new Map([...local].map((id, index) => [id, remote[index]]));
      const mergeable = [...before].filter(
        ([id, other]) => other !== undefined && before.get(id + 1) === other + 1,
      ).length;
      orderForRuns(local, remote);
      expect(new Map([...local].map((id, index) => [id, remote[index]]))).toEqual(before);
      expect(countRuns(local, remote)).toBe(local.length - mergeable);
    }),
    { numRuns: 500 },
  );
});

test("blocks handed out backwards on both sides become one run", () => {
  const [local, remote] = [Int32Array.of(9, 8, 7), Int32Array.of(3, 2, 1)];
  orderForRuns(local, remote);
  expect([...local, ...remote]).toEqual([7, 8, 9, 1, 2, 3]);
  expect(countRuns(local, remote)).toBe(1);
});
