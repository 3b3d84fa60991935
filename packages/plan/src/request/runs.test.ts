import fc from "fast-check";
import { describe, expect, test } from "vitest";
import {
  addBlockRuns,
  addRun,
  type BlockLists,
  noRuns,
  orderForRuns,
  overlap,
  partsOfRuns,
  reserveRuns,
  rowsOfRuns,
} from "./runs.js";

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

test("ordering keeps every pair and merges all adjacent runs", () => {
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

test("overlap finds a part that is in two runs", () => {
  const runs = noRuns();
  addRun(runs, 4, 0, 3);
  addRun(runs, 2, 9, 3);
  expect(overlap(orderForRuns(runs))).toBe(4);
});

test("does not merge runs that are consecutive on one side only", () => {
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

test("returns ascending runs unchanged and ignores unused capacity", () => {
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

test("uses reserved capacity, and at most doubles it", () => {
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

test("any number of consecutive blocks is one row", () => {
  const ids = Array.from({ length: 100_000 }, (_, index) => index);
  expect([...rowsOfRuns(runsOf(ids, ids))]).toEqual([0, 0, 100_000]);
});

/** Rows `[local part, remote part, count]` of a pairing. */
function rowsOf(lists: Partial<BlockLists>) {
  const runs = noRuns();
  addBlockRuns(runs, {
    localIds: [],
    remoteIds: [],
    localPer: 1,
    remotePer: 1,
    localStart: 0,
    remoteStart: 0,
    count: 0,
    ...lists,
  });
  const rows = [...rowsOfRuns(runs)];
  expect(runs.parts).toBe(lists.count ?? 0);
  return Array.from({ length: rows.length / 3 }, (_, row) => rows.slice(row * 3, row * 3 + 3));
}

describe("blocks of one size", () => {
  test("blocks consecutive on both sides are one row, and a step on either side starts another", () => {
    const lists = { localIds: [4, 5, 6, 9, 10, 11], remoteIds: [0, 1, 2, 3, 4, 7], count: 6 };
    expect(rowsOf(lists)).toEqual([
      [4, 0, 3],
      [9, 3, 2],
      [11, 7, 1],
    ]);
  });

  test("allocates the exact number of rows once", () => {
    const runs = noRuns();
    addBlockRuns(runs, {
      localIds: [4, 5, 9, 2],
      remoteIds: [0, 1, 2, 3],
      localPer: 2,
      remotePer: 2,
      localStart: 0,
      remoteStart: 0,
      count: 8,
    });
    expect([runs.rows.length, runs.length]).toEqual([9, 9]);
  });

  test("joins the parts of a block, and takes only the needed parts of the last block", () => {
    const lists = { localIds: [4, 5, 7], remoteIds: [1, 2, 3], localPer: 4, remotePer: 4 };
    expect(rowsOf({ ...lists, count: 12 })).toEqual([
      [16, 4, 8],
      [28, 12, 4],
    ]);
    expect(rowsOf({ ...lists, count: 9 })).toEqual([
      [16, 4, 8],
      [28, 12, 1],
    ]);
    expect(rowsOf({ ...lists, count: 5 })).toEqual([[16, 4, 5]]);
    // Also where the lists would go on.
    const longer = { ...lists, localIds: [4, 5, 6] };
    expect(rowsOf({ ...longer, count: 5 })).toEqual([[16, 4, 5]]);
  });

  test("a start at a block boundary skips whole blocks", () => {
    const lists = { localIds: [9, 4, 5], remoteIds: [0, 7, 1, 2], localPer: 2, remotePer: 2 };
    expect(rowsOf({ ...lists, localStart: 2, remoteStart: 4, count: 4 })).toEqual([[8, 2, 4]]);
    // Neither of the steps from skipped blocks counts.
    expect(rowsOf({ ...lists, localStart: 2, remoteStart: 2, count: 4 })).toEqual([
      [8, 14, 2],
      [10, 2, 2],
    ]);
  });

  test("does not compare the first block with the skipped block before it", () => {
    const skip = { localPer: 2, remotePer: 2, localStart: 2, remoteStart: 2, count: 4 };
    expect(rowsOf({ ...skip, localIds: [6, 5, 9], remoteIds: [0, 1, 2] })).toEqual([
      [10, 2, 2],
      [18, 4, 2],
    ]);
    expect(rowsOf({ ...skip, localIds: [0, 1, 2], remoteIds: [6, 5, 9] })).toEqual([
      [2, 10, 2],
      [4, 18, 2],
    ]);
  });

  test("a start within a block, on one side or both", () => {
    const lists = { localIds: [4, 5], remoteIds: [1, 2], localPer: 2, remotePer: 2 };
    // Parts 8, 9, 10, 11 here; 2, 3, 4, 5 there.
    expect(rowsOf({ ...lists, remoteStart: 1, count: 3 })).toEqual([[8, 3, 3]]);
    expect(rowsOf({ ...lists, localStart: 1, count: 3 })).toEqual([[9, 2, 3]]);
    expect(rowsOf({ ...lists, localStart: 1, remoteStart: 1, count: 2 })).toEqual([[9, 3, 2]]);
  });

  test("empty lists give no row", () => {
    expect(rowsOf({})).toEqual([]);
  });
});

describe("blocks of different sizes", () => {
  const lists = { localIds: [4, 6], remoteIds: [0, 1, 2, 7], localPer: 4, remotePer: 2 };

  test("pairs part by part, and merges parts consecutive on both sides", () => {
    // Parts 16 to 19 and 24 to 27 here; 0 to 5, then 14 and 15 there.
    expect(rowsOf({ ...lists, count: 8 })).toEqual([
      [16, 0, 4],
      [24, 4, 2],
      [26, 14, 2],
    ]);
    expect(rowsOf({ ...lists, count: 7 })).toEqual([
      [16, 0, 4],
      [24, 4, 2],
      [26, 14, 1],
    ]);
  });

  test("starts within a block on both sides", () => {
    expect(rowsOf({ ...lists, localStart: 3, remoteStart: 5, count: 3 })).toEqual([
      [19, 5, 1],
      [24, 14, 2],
    ]);
  });

  test("starts at the last part of a smaller block", () => {
    // Part 19 here; 36 to 38 are the next block's.
    const from = {
      localIds: [4, 9],
      localPer: 4,
      remoteIds: [0],
      remotePer: 8,
      localStart: 3,
      count: 4,
    };
    expect(rowsOf(from)).toEqual([
      [19, 0, 1],
      [36, 1, 3],
    ]);
  });

  test("with larger remote blocks", () => {
    const turned = { localIds: [0, 1, 2, 7], remoteIds: [4, 6], localPer: 2, remotePer: 3 };
    // Parts 0 to 5 and 14, 15 here; 12 to 14 and 18 to 20 there.
    expect(rowsOf({ ...turned, count: 6 })).toEqual([
      [0, 12, 3],
      [3, 18, 3],
    ]);
  });
});
