import { descriptorPairs } from "@kv/interface";
import fc from "fast-check";
import { describe, expect, test } from "vitest";
import type { RegionIndexing } from "../engine/descriptor-tables.js";
import {
  type BatchShape,
  overlap,
  ReadIds,
  Runs,
  requestRead,
  swapDirection,
} from "./request-read.js";

type Pair = readonly [local: number, remote: number];

function pairsOf(spelled: Parameters<typeof descriptorPairs>[0]): Pair[] {
  const { localIds, remoteIds } = descriptorPairs(spelled);
  return Array.from(localIds, (id, at) => [id, remoteIds[at] as number]);
}
const sorted = (pairs: readonly Pair[]) => [...pairs].sort(([a, b], [c, d]) => a - c || b - d);
/** Runs without one that continues the run before it. */
const fewest = (pairs: readonly Pair[]) =>
  pairs.filter(([local, remote], at) => {
    const before = pairs[at - 1];
    return before === undefined || local !== before[0] + 1 || remote !== before[1] + 1;
  }).length;

describe("runs", () => {
  const id = fc.nat({ max: 15 });
  const lists = fc
    .record({
      localIds: fc.uniqueArray(id, { minLength: 1, maxLength: 12 }),
      others: fc.option(fc.array(id, { minLength: 1, maxLength: 12 }), { nil: undefined }),
      localPer: fc.integer({ min: 1, max: 4 }),
      remotePer: fc.integer({ min: 1, max: 4 }),
      draws: fc.tuple(fc.nat(), fc.nat(), fc.nat()),
    })
    .map(({ others, draws: [one, two, three], ...given }) => {
      const remoteIds = others ?? given.localIds.map((local) => local + 5);
      const [parts, held] = [
        given.localIds.length * given.localPer,
        remoteIds.length * given.remotePer,
      ];
      const [localStart, remoteStart] = [one % parts, two % held];
      const count = 1 + (three % Math.min(parts - localStart, held - remoteStart));
      return { ...given, remoteIds, localStart, remoteStart, count };
    });

  test("pair the parts of two lists of blocks, in the fewest rows, as listed and in order", () => {
    fc.assert(
      fc.property(lists, (given) => {
        const partsOf = (ids: readonly number[], per: number, start: number) =>
          ids
            .flatMap((block) => Array.from({ length: per }, (_, part) => block * per + part))
            .slice(start, start + given.count);
        const remote = partsOf(given.remoteIds, given.remotePer, given.remoteStart);
        const wanted = partsOf(given.localIds, given.localPer, given.localStart).map(
          (part, at): Pair => [part, remote[at] as number],
        );
        const runs = new Runs(1);
        runs.addBlocks(given);
        for (const [pairs, rows] of [
          [wanted, runs.rows],
          [sorted(wanted), runs.ordered()],
        ] as const) {
          expect(pairsOf({ runs: rows })).toEqual(pairs);
          expect(rows.length / 3).toBe(fewest(pairs));
        }
        expect(overlap(runs.ordered())).toBeUndefined();
      }),
    );
  });

  test("may be any number, and overlap finds a part that is in two of them", () => {
    const many = new Runs();
    for (let at = 0; at < 100_000; at++) many.add(2 * at, at, 1);
    expect([many.rows.length, many.rows.at(-3)]).toEqual([300_000, 199_998]);
    const twice = new Runs();
    twice.add(4, 0, 3);
    twice.add(2, 9, 3);
    expect(overlap(twice.ordered())).toBe(4);
  });
});

interface Side {
  readonly parts: number;
  readonly blocks: number;
  /** The table has a row for each part of all blocks. */
  readonly isStepped?: boolean;
}

function shapeOf(local: Side, remote: Side, { batch = 0, segments = 1, partBytes = 100 } = {}) {
  const indexing = ({ parts, blocks, isStepped = false }: Side) =>
    Array.from({ length: segments }, (_, segment): RegionIndexing => {
      const [blockStep, partStep] = isStepped ? [1, blocks] : [parts, 1];
      return { offset: segment * parts * blocks, count: parts * blocks, blockStep, partStep };
    });
  const [mine, theirs] = [indexing(local), indexing(remote)];
  return {
    batch,
    partBytes,
    localParts: local.parts,
    remoteParts: remote.parts,
    local: mine,
    remote: theirs,
    offsets: Int32Array.from(mine.flatMap(({ offset }, at) => [offset, theirs[at]?.offset ?? 0])),
    isEven: [local, remote].every(({ parts, isStepped }) => parts === 1 || isStepped !== true),
  } satisfies BatchShape;
}

const PLACE = { remoteRank: 3, remotePpRank: 1, sourceIndex: 2, listIndex: 0 };
const readOf = (shapes: readonly BatchShape[], ...rows: (readonly number[] | undefined)[]) =>
  requestRead(
    PLACE,
    new ReadIds(
      shapes,
      rows.map((row) => row && Int32Array.from(row)),
    ),
  );

describe("a read", () => {
  const side = fc.record({
    parts: fc.integer({ min: 1, max: 3 }),
    blocks: fc.constant(20),
    isStepped: fc.boolean(),
  });
  const part = fc.nat({ max: 19 });
  const batches = fc.array(
    fc.record({
      sides: fc.tuple(side, side),
      segments: fc.integer({ min: 1, max: 3 }),
      moved: fc.uniqueArray(fc.tuple(part, part), { selector: ([local]) => local, maxLength: 12 }),
      isAsked: fc.boolean(),
    }),
    { minLength: 1, maxLength: 3 },
  );

  test("has the same pairs in every spelling: of each batch, by segment, run and part", () => {
    fc.assert(
      fc.property(batches, (drawn) => {
        const shapes = drawn.map(({ sides, segments }, batch) =>
          shapeOf(...sides, { batch, segments, partBytes: 10 + batch }),
        );
        const rows = drawn.map(({ moved, isAsked }) => {
          const runs = new Runs();
          for (const [local, remote] of moved) runs.add(local, remote, 1);
          return isAsked ? runs.ordered() : undefined;
        });
        const ids = new ReadIds(shapes, rows);
        const read = requestRead(PLACE, ids);
        const idOf = (at: number, parts: number, { offset, blockStep, partStep }: RegionIndexing) =>
          offset + Math.floor(at / parts) * blockStep + (at % parts) * partStep;
        const wanted = shapes.map(({ localParts, remoteParts, local, remote }, batch) =>
          local.flatMap((mine, segment) =>
            pairsOf({ runs: rows[batch] ?? new Int32Array(0) }).map(
              ([one, other]): Pair => [
                idOf(one, localParts, mine),
                idOf(other, remoteParts, remote[segment] as RegionIndexing),
              ],
            ),
          ),
        );
        expect(pairsOf({ localIds: read.localIds, remoteIds: read.remoteIds })).toEqual(
          wanted.flat(),
        );
        for (const spelled of [{ runs: read.runs }, read.descriptors])
          expect(sorted(pairsOf(spelled))).toEqual(sorted(wanted.flat()));
        expect(ids.runCount).toBe(read.runs.length / 3);
        expect([read.descriptorCount, read.lengthBytes]).toEqual([
          wanted.flat().length,
          rows.reduce((sum, row, batch) => {
            return sum + (10 + batch) * pairsOf({ runs: row ?? new Int32Array(0) }).length;
          }, 0),
        ]);
      }),
    );
  });

  test("gives a transfer the runs and offsets without expanding them, and keeps what it made", () => {
    const shape = shapeOf({ parts: 1, blocks: 100 }, { parts: 1, blocks: 50 }, { segments: 2 });
    const read = readOf([shape], [4, 1, 2, 9, 7, 1]);
    expect(read).toMatchObject({ ...PLACE, lengthBytes: 300 });
    expect(read.descriptors).toEqual({
      runs: Int32Array.of(4, 1, 2, 9, 7, 1),
      offsets: Int32Array.of(0, 0, 100, 50),
    });
    expect([...read.runs]).toEqual([4, 1, 2, 9, 7, 1, 104, 51, 2, 109, 57, 1]);
    for (const name of ["descriptors", "runs", "localIds", "remoteIds"] as const)
      expect(read[name]).toBe(read[name]);
  });

  test("joins the same part of neighbouring blocks, and is spelled as pairs where that is shorter", () => {
    const stepped = { parts: 2, blocks: 10, isStepped: true };
    const alike = readOf([shapeOf(stepped, { ...stepped, blocks: 20 })], [6, 2, 4]);
    // Part 7 is part 1 of block 3, at 3 + 10.
    expect(alike.descriptors).toEqual({ runs: Int32Array.of(3, 1, 2, 13, 21, 2) });
    const plain = readOf([shapeOf(stepped, { parts: 1, blocks: 30 })], [6, 20, 4]);
    expect(plain.descriptors).toEqual({
      localIds: Int32Array.of(3, 13, 4, 14),
      remoteIds: Int32Array.of(20, 21, 22, 23),
    });
  });
});

test("swapDirection exchanges the sides of pairs, runs and offsets, and leaves its input", () => {
  const [localIds, remoteIds] = [Int32Array.of(1, 2), Int32Array.of(7, 9)];
  const swapped = swapDirection({ localIds, remoteIds });
  expect(swapped).toEqual({ localIds: remoteIds, remoteIds: localIds });
  const runs = Int32Array.of(1, 7, 3, 20, 40, 5);
  const turned = Int32Array.of(7, 1, 3, 40, 20, 5);
  expect(swapDirection({ runs })).toEqual({ runs: turned });
  expect(swapDirection({ runs, offsets: Int32Array.of(0, 100, 5, 105) })).toEqual({
    runs: turned,
    offsets: Int32Array.of(100, 0, 105, 5),
  });
  expect(runs).toEqual(Int32Array.of(1, 7, 3, 20, 40, 5));
});
