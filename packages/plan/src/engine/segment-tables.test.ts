import { describe, expect, test } from "vitest";
import type { RegionGeometry } from "../geometry/rank-geometry.js";
import { sampleRank } from "../sample-pair.test-support.js";
import { indexingOf, type SegmentSide, tableOf } from "./segment-tables.js";

const rank = sampleRank({ deviceId: 3, physicalBlocksPerLogical: 2 });

/** A segment of a region of 11 blocks of 512 bytes at 4096; `strideBytes` from one to the next. */
function side(
  strideBytes: number,
  change: Partial<SegmentSide> = {},
  region: Partial<RegionGeometry> = {},
): SegmentSide {
  return {
    region: {
      ...{ name: "layer.0", baseAddress: 4096, numBlocks: 11, blockLengthBytes: 512 },
      ...{ blockStrideBytes: strideBytes, groupId: 0, memoryType: "VRAM", ...region },
    },
    unit: "kernel-block",
    parts: 1,
    lengthBytes: 512,
    place: { offsetBytes: 0, partStrideBytes: 512 },
    ...change,
  };
}
const halves = { parts: 2, lengthBytes: 256, place: { offsetBytes: 0, partStrideBytes: 256 } };
/** Half of the heads of each half of the tokens: parts are evenly spaced, with room between them. */
const headsOfHalves = { parts: 2, lengthBytes: 128, place: { offsetBytes: 128, partStrideBytes: 256 } };
/** One head of two, in two parts: they lie together, and the other head's behind them. */
const head = { parts: 2, lengthBytes: 128, place: { offsetBytes: 256, partStrideBytes: 128 } };
const logical = { unit: "logical-block", lengthBytes: 900 } as const;

// A row: address, length, device, stride, count.
describe.each<[string, SegmentSide, object, readonly (readonly number[])[]]>([
  ["whole blocks", side(512), { count: 11, blockStep: 1, partStep: 1 }, [[4096, 512, 3, 512, 11]]],
  [
    "blocks with padding between them",
    side(600),
    { count: 11, blockStep: 1, partStep: 1 },
    [[4096, 512, 3, 600, 11]],
  ],
  [
    "parts that follow one another over all blocks",
    side(512, halves),
    { count: 22, blockStep: 2, partStep: 1 },
    [[4096, 256, 3, 256, 22]],
  ],
  [
    "some heads of such parts",
    side(512, headsOfHalves),
    { count: 22, blockStep: 2, partStep: 1 },
    [[4224, 128, 3, 256, 22]],
  ],
  [
    "parts of padded blocks: a row for each part",
    side(600, halves),
    { count: 22, blockStep: 1, partStep: 11 },
    [
      [4096, 256, 3, 600, 11],
      [4352, 256, 3, 600, 11],
    ],
  ],
  [
    "parts of one head",
    side(512, head),
    { count: 22, blockStep: 1, partStep: 11 },
    [
      [4352, 128, 3, 512, 11],
      [4480, 128, 3, 512, 11],
    ],
  ],
  [
    "logical blocks: a kernel block that is none of them is left out",
    side(512, logical),
    { count: 5, blockStep: 1, partStep: 1 },
    [[4096, 900, 3, 1024, 5]],
  ],
  [
    "a region on a device of its own",
    side(512, {}, { deviceId: 0 }),
    { count: 11, blockStep: 1, partStep: 1 },
    [[4096, 512, 0, 512, 11]],
  ],
])("%s", (_what, segment, steps, rows) => {
  test("indices step through the rows", () => {
    expect(indexingOf(rank, segment, 7)).toEqual({ offset: 7, ...steps });
  });
  test("the rows are those of its bytes", () => {
    expect([...tableOf(rank, [segment]).rows]).toEqual(rows.flat());
  });
});

test("a table has the rows of its segments in turn, and their memory", () => {
  const table = tableOf(rank, [side(600, halves), side(512, {}, { baseAddress: 65536 })]);
  expect(table.memoryType).toBe("VRAM");
  expect([...table.rows]).toEqual([
    ...[4096, 256, 3, 600, 11],
    ...[4352, 256, 3, 600, 11],
    ...[65536, 512, 3, 512, 11],
  ]);
});

test("a stage that holds nothing of a list has an empty table", () => {
  expect(tableOf(rank, [])).toEqual({ memoryType: "DRAM", rows: new Float64Array(0) });
});
