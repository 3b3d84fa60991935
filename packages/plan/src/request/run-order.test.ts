import fc from "fast-check";
import { expect, test } from "vitest";
import { addRun, noRuns, orderForRuns, overlap, partsOfRuns, reserveRuns, rowsOfRuns } from "./run-order.js";

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

test("runs that follow one another on one side alone stay apart", () => {
  const runs = noRuns();
  addRun(runs, 0, 10, 2);
  addRun(runs, 5, 12, 2);
  addRun(runs, 7, 20, 1);
  expect([...rowsOfRuns(runs)]).toEqual([0, 10, 2, 5, 12, 2, 7, 20, 1]);
  expect([[...partsOfRuns(runs, 0)], [...partsOfRuns(runs, 1)]]).toEqual([
    [0, 1, 5, 6, 7],
    [10, 11, 12, 13, 20],
  ]);
});

test("ascending runs are left alone, and looked at no further than they reach", () => {
  // With room behind the last one, and without.
  const roomy = runsOf([2, 4], [0, 0]);
  expect(orderForRuns(roomy)).toBe(roomy);
  expect(overlap(roomy)).toBeUndefined();
  const exact = noRuns();
  reserveRuns(exact, 3);
  for (const local of [0, 2, 4]) addRun(exact, local, 9, 1);
  expect(orderForRuns(exact)).toBe(exact);
  expect(overlap(exact)).toBeUndefined();
});

test("room that is there is used; else it at most doubles", () => {
  const runs = noRuns();
  reserveRuns(runs, 4);
  const { rows } = runs;
  reserveRuns(runs, 4);
  for (let index = 0; index < 4; index++) addRun(runs, index * 2, 0, 1);
  expect(runs.rows).toBe(rows);
  expect(rowsOfRuns(runs)).toBe(rows);
  for (let index = 4; index < 1000; index++) {
    addRun(runs, index * 2, 0, 1);
    expect(runs.rows.length).toBeLessThanOrEqual(2 * runs.length + 3 * 8);
  }
  expect(runs.length).toBe(3000);
});

test("consecutive blocks are one row, however many", () => {
  const ids = Array.from({ length: 100_000 }, (_, index) => index);
  expect([...rowsOfRuns(runsOf(ids, ids))]).toEqual([0, 0, 100_000]);
});
