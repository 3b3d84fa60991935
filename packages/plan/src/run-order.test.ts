import fc from "fast-check";
import { expect, test } from "vitest";
import { addRun, noRuns, orderForRuns, overlap, partsOfRuns, rowsOfRuns } from "./run-order.js";

const pairsArbitrary = fc.uniqueArray(fc.nat({ max: 400 }), { maxLength: 80 }).chain((local) =>
  fc.record({
    local: fc.constant(local),
    remote: fc.array(fc.nat({ max: 400 }), { minLength: local.length, maxLength: local.length }),
  }),
);

function runsOf(local: readonly number[], remote: readonly number[]) {
  const runs = noRuns();
  for (const [index, id] of local.entries()) addRun(runs, id, remote[index] as number, 1);
  return runs;
}

test("ordering keeps every pair, and merges all that can be merged", () => {
  fc.assert(
    fc.property(pairsArbitrary, ({ local, remote }) => {
      const ordered = orderForRuns(runsOf(local, remote));
      const [locals, remotes] = [partsOfRuns(ordered, 0), partsOfRuns(ordered, 1)];
      const byLocal = local
        .map((id, index) => [id, remote[index] as number] as const)
        .sort(([one], [other]) => one - other);
      expect([...locals].map((id, index) => [id, remotes[index]])).toEqual(byLocal);
      const merged = byLocal.filter(([id, from], index) => {
        const before = byLocal[index - 1];
        return before === undefined || id !== before[0] + 1 || from !== before[1] + 1;
      });
      expect(rowsOfRuns(ordered).length / 3).toBe(merged.length);
      expect(overlap(ordered)).toBeUndefined();
    }),
  );
});

test("a part in two runs is found", () => {
  const runs = noRuns();
  addRun(runs, 4, 0, 3);
  addRun(runs, 2, 9, 3);
  expect(overlap(orderForRuns(runs))).toBe(4);
});

test("consecutive blocks are one row, however many", () => {
  const ids = Array.from({ length: 100_000 }, (_, index) => index);
  expect([...rowsOfRuns(runsOf(ids, ids))]).toEqual([0, 0, 100_000]);
});
