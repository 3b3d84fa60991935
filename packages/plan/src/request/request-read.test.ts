import { describe, expect, test } from "vitest";
import { type Batch, batchOfRuns, readIndices, requestRead } from "./request-read.js";
import type { BatchShape, RegionSpan } from "./request-shape.js";
import { addRun, noRuns } from "./runs.js";

type Run = readonly [local: number, remote: number, count: number];

function batch(...rows: readonly Run[]): Batch {
  const runs = noRuns();
  for (const [local, remote, count] of rows) addRun(runs, local, remote, count);
  return batchOfRuns(runs);
}
const span = (blockStep: number, partStep: number, ...offsets: readonly number[]): RegionSpan => ({
  blockStep,
  partStep,
  offsets: Int32Array.from(offsets),
});

/** Segments of a batch: spans of either side, with as many parts to a block. */
function shapeOf(
  index: number,
  [localParts, localSpans]: readonly [number, readonly RegionSpan[]],
  [remoteParts, remoteSpans]: readonly [number, readonly RegionSpan[]],
  { even = false, partBytes = 100 } = {},
): BatchShape {
  const all = (spans: readonly RegionSpan[]) =>
    Int32Array.from(spans.flatMap(({ offsets }) => [...offsets]));
  const [localOffsets, remoteOffsets] = [all(localSpans), all(remoteSpans)];
  return {
    batch: index,
    segmentCount: localOffsets.length,
    partBytes,
    even,
    localParts,
    remoteParts,
    localSpans,
    remoteSpans,
    localOffsets,
    remoteOffsets,
    offsets: Int32Array.from(
      [...localOffsets].flatMap((local, at) => [local, remoteOffsets[at] ?? -1]),
    ),
  };
}
const EVEN = { even: true };

/** A read, and its contents in plain arrays. */
function readOf(shapes: readonly BatchShape[], batches: readonly (Batch | undefined)[]) {
  const indices = readIndices(
    { sourceIndex: 0, listIndex: 0, batches: shapes, sameAs: undefined },
    batches,
  );
  const read = requestRead(indices, {
    remoteRank: 3,
    remotePpRank: 1,
    sourceIndex: 2,
    listIndex: 0,
  });
  const { localIds, remoteIds, runs } = read.descriptors;
  const said = {
    runs: [...read.runs],
    localIds: [...read.localIds],
    remoteIds: [...read.remoteIds],
    runCount: indices.runCount,
    descriptorCount: read.descriptorCount,
    lengthBytes: read.lengthBytes,
  };
  return { indices, read, said, spelling: runs === undefined ? [localIds, remoteIds] : runs };
}

describe("each run repeats unchanged in every segment", () => {
  const shape = shapeOf(0, [1, [span(1, 1, 0, 100)]], [1, [span(1, 1, 0, 50)]], EVEN);
  const made = () => readOf([shape], [batch([4, 1, 2], [9, 7, 1])]);

  test("repeats the runs at each segment's offsets", () => {
    const { read, said } = made();
    expect(said).toEqual({
      runs: [4, 1, 2, 9, 7, 1, 104, 51, 2, 109, 57, 1],
      localIds: [4, 5, 9, 104, 105, 109],
      remoteIds: [1, 2, 7, 51, 52, 57],
      runCount: 4,
      descriptorCount: 6,
      lengthBytes: 300,
    });
    expect(read).toMatchObject({ remoteRank: 3, remotePpRank: 1, sourceIndex: 2, listIndex: 0 });
  });

  test("gives a transfer the runs and offsets without expanding them", () => {
    expect(made().read.descriptors).toEqual({
      runs: Int32Array.of(4, 1, 2, 9, 7, 1),
      offsets: Int32Array.of(0, 0, 100, 50),
    });
  });

  test("caches its results", () => {
    const { read } = made();
    expect(read.descriptors).toBe(read.descriptors);
    expect(read.runs).toBe(read.runs);
    expect(read.localIds).toBe(read.localIds);
    expect(read.remoteIds).toBe(read.remoteIds);
    const again = batch([1, 2, 3]);
    expect(again.localParts()).toBe(again.localParts());
    expect(again.remoteParts()).toBe(again.remoteParts());
  });

  test("keeps one run per segment, also for adjacent segments", () => {
    const touching = shapeOf(0, [1, [span(1, 1, 0, 10)]], [1, [span(1, 1, 0, 10)]], EVEN);
    expect(readOf([touching], [batch([0, 0, 10])]).said).toMatchObject({
      runs: [0, 0, 10, 10, 10, 10],
      runCount: 2,
      descriptorCount: 20,
    });
  });

  test("no batch gives no descriptors", () => {
    expect(readOf([shape], [undefined]).said).toEqual({
      runs: [],
      localIds: [],
      remoteIds: [],
      runCount: 0,
      descriptorCount: 0,
      lengthBytes: 0,
    });
    expect(readOf([shape], [undefined]).indices.repeated()).toBeUndefined();
  });
});

test("joins several batches and uses the shorter of runs and pairs", () => {
  const shapes = [
    shapeOf(1, [1, [span(1, 1, 0, 100)]], [1, [span(1, 1, 0, 100)]], EVEN),
    shapeOf(0, [1, [span(1, 1, 200)]], [1, [span(1, 1, 300)]], { even: true, partBytes: 7 }),
    shapeOf(2, [1, [span(1, 1, 900)]], [1, [span(1, 1, 900)]], EVEN),
  ];
  const { indices, said, spelling, read } = readOf(shapes, [
    batch([5, 5, 4]),
    batch([1, 2, 2]),
    undefined,
  ]);
  expect(said).toEqual({
    runs: [1, 2, 2, 101, 102, 2, 205, 305, 4],
    localIds: [1, 2, 101, 102, 205, 206, 207, 208],
    remoteIds: [2, 3, 102, 103, 305, 306, 307, 308],
    runCount: 3,
    descriptorCount: 8,
    lengthBytes: 2 * 100 + 4 * 7,
  });
  expect(indices.repeated()).toBeUndefined();
  expect(spelling).toBe(read.runs);
});

describe("tables with one row per part", () => {
  // Ten blocks in each of two rows here, twenty there: part 7 is part 1 of block 3, at 3 + 10.
  const [mine, theirs] = [span(1, 10, 0, 100), span(1, 20, 0, 200)];

  test("runs join the same part of consecutive blocks", () => {
    const shape = shapeOf(0, [2, [mine]], [2, [theirs]]);
    const { said, spelling, read, indices } = readOf([shape], [batch([6, 2, 4])]);
    expect(said).toEqual({
      runs: [3, 1, 2, 13, 21, 2, 103, 201, 2, 113, 221, 2],
      localIds: [3, 13, 4, 14, 103, 113, 104, 114],
      remoteIds: [1, 21, 2, 22, 201, 221, 202, 222],
      runCount: 4,
      descriptorCount: 8,
      lengthBytes: 400,
    });
    // Four runs are twelve numbers, eight pairs sixteen.
    expect(spelling).toBe(read.runs);
    expect(indices.repeated()).toBeUndefined();
  });

  test("uses pairs when the other side has no parts, because nothing is consecutive", () => {
    const shape = shapeOf(0, [2, [span(1, 10, 0)]], [1, [span(1, 1, 0)]]);
    const { said, spelling, read } = readOf([shape], [batch([6, 20, 4])]);
    expect(said).toMatchObject({
      runs: [3, 20, 1, 4, 22, 1, 13, 21, 1, 14, 23, 1],
      localIds: [3, 13, 4, 14],
      remoteIds: [20, 21, 22, 23],
      runCount: 4,
    });
    expect(spelling).toEqual([read.localIds, read.remoteIds]);
    const turned = shapeOf(0, [1, [span(1, 1, 0)]], [2, [span(1, 10, 0)]]);
    expect(readOf([turned], [batch([20, 6, 4])]).said).toMatchObject({
      runs: [20, 3, 1, 22, 4, 1, 21, 13, 1, 23, 14, 1],
      remoteIds: [3, 13, 4, 14],
    });
  });

  test("runs that start or end within a block", () => {
    const shape = shapeOf(0, [2, [span(1, 10, 0)]], [2, [span(1, 20, 0)]]);
    // Parts 7, 8, 9 here, and 3, 4, 5 there; then part 0 and part 1.
    expect(readOf([shape], [batch([7, 3, 3])]).said).toMatchObject({
      runs: [13, 21, 2, 4, 2, 1],
      localIds: [13, 4, 14],
      remoteIds: [21, 2, 22],
    });
    expect(readOf([shape], [batch([0, 1, 1])]).said).toMatchObject({
      runs: [0, 20, 1],
      localIds: [0],
    });
  });

  test("several runs, and several spans", () => {
    const shape = shapeOf(
      0,
      [2, [span(1, 10, 0), span(2, 1, 50)]],
      [2, [span(2, 1, 0), span(1, 20, 70)]],
    );
    const { said } = readOf([shape], [batch([0, 2, 2], [6, 8, 2])]);
    expect(said).toMatchObject({
      localIds: [0, 10, 3, 13, 50, 51, 56, 57],
      remoteIds: [2, 3, 8, 9, 71, 91, 74, 94],
      runs: [0, 2, 1, 10, 3, 1, 3, 8, 1, 13, 9, 1, 50, 71, 1, 51, 91, 1, 56, 74, 1, 57, 94, 1],
    });
  });

  test("steps with gaps between blocks or parts", () => {
    const shape = shapeOf(0, [2, [span(4, 1, 0)]], [2, [span(2, 5, 0)]]);
    // Parts 2, 3 are those of block 1.
    expect(readOf([shape], [batch([2, 2, 2])]).said).toMatchObject({
      localIds: [4, 5],
      remoteIds: [2, 7],
    });
  });

  test("together with an even batch", () => {
    const shapes = [
      shapeOf(0, [1, [span(1, 1, 0, 10)]], [1, [span(1, 1, 0, 20)]], EVEN),
      shapeOf(1, [2, [span(1, 10, 100)]], [2, [span(1, 20, 200)]]),
    ];
    expect(readOf(shapes, [batch([1, 2, 2]), batch([6, 2, 4])]).said).toEqual({
      runs: [1, 2, 2, 11, 22, 2, 103, 201, 2, 113, 221, 2],
      localIds: [1, 2, 11, 12, 103, 113, 104, 114],
      remoteIds: [2, 3, 22, 23, 201, 221, 202, 222],
      runCount: 4,
      descriptorCount: 8,
      lengthBytes: 600,
    });
  });
});
