import { describe, expect, test } from "vitest";
import type { RegionGeometry } from "../geometry/rank-geometry.js";
import { sampleRank } from "../sample-pair.test-support.js";
import {
  addressOf,
  descriptorRows,
  indexingOf,
  rowIndexOf,
  type SegmentSide,
  tableOf,
} from "./descriptor-tables.js";

const rank = sampleRank({ deviceId: 3, physicalBlocksPerLogical: 2 });

/**
 * A segment of a region of 11 blocks of 512 bytes at address 4096, with a block stride of
 * `strideBytes`.
 */
function side(
  strideBytes: number,
  change: Partial<SegmentSide> = {},
  region: Partial<RegionGeometry> = {},
): SegmentSide {
  return {
    region: {
      name: "layer.0",
      baseAddress: 4096,
      numBlocks: 11,
      blockLengthBytes: 512,
      blockStrideBytes: strideBytes,
      groupId: 0,
      memoryType: "VRAM",
      ...region,
    },
    unit: "kernel-block",
    parts: 1,
    lengthBytes: 512,
    place: { offsetBytes: 0, partStrideBytes: 512 },
    ...change,
  };
}
const halves = { parts: 2, lengthBytes: 256, place: { offsetBytes: 0, partStrideBytes: 256 } };
/**
 * Half of the heads in each half of the tokens: the parts are evenly spaced, with gaps between
 * them.
 */
const headsOfHalves = {
  parts: 2,
  lengthBytes: 128,
  place: { offsetBytes: 128, partStrideBytes: 256 },
};
/** One head of two, in two parts: the parts of one head are adjacent. */
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
    "parts that are contiguous across blocks",
    side(512, halves),
    { count: 22, blockStep: 2, partStep: 1 },
    [[4096, 256, 3, 256, 22]],
  ],
  [
    "some heads of contiguous parts",
    side(512, headsOfHalves),
    { count: 22, blockStep: 2, partStep: 1 },
    [[4224, 128, 3, 256, 22]],
  ],
  [
    "parts of padded blocks, one row per part",
    side(600, halves),
    { count: 22, blockStep: 1, partStep: 11 },
    [
      [4096, 256, 3, 600, 11],
      [4352, 256, 3, 600, 11],
    ],
  ],
  [
    "parts of one of two heads",
    side(512, head),
    { count: 22, blockStep: 1, partStep: 11 },
    [
      [4352, 128, 3, 512, 11],
      [4480, 128, 3, 512, 11],
    ],
  ],
  [
    "logical blocks",
    side(512, logical, { numBlocks: 10 }),
    { count: 5, blockStep: 1, partStep: 1 },
    [[4096, 900, 3, 1024, 5]],
  ],
  [
    "a region with its own device id",
    side(512, {}, { deviceId: 0 }),
    { count: 11, blockStep: 1, partStep: 1 },
    [[4096, 512, 0, 512, 11]],
  ],
])("%s", (_what, segment, steps, rows) => {
  test("the indexing gives the offset, count and steps", () => {
    expect(indexingOf(rank, segment, 7)).toEqual({ offset: 7, ...steps });
  });
  test("the table's rows have the segment's addresses and lengths", () => {
    expect([...tableOf(rank, [segment]).rows]).toEqual(rows.flat());
  });
});

test("a table has its segments' rows in order, and their memory type", () => {
  const table = tableOf(rank, [side(600, halves), side(512, {}, { baseAddress: 65536 })]);
  expect(table.memoryType).toBe("VRAM");
  expect([...table.rows]).toEqual([
    4096, 256, 3, 600, 11, 4352, 256, 3, 600, 11, 65536, 512, 3, 512, 11,
  ]);
});

test("a list without segments has an empty table", () => {
  expect(tableOf(rank, [])).toEqual({ memoryType: "DRAM", rows: new Float64Array(0) });
});

/** Rows of 3, 1 and 5 descriptors. */
const TABLE = {
  memoryType: "DRAM" as const,
  rows: Float64Array.from([1000, 10, 0, 16, 3, 5000, 20, 1, 32, 1, 9000, 30, 0, 64, 5]),
};

test("finds the row and the address of each descriptor id", () => {
  const rows = descriptorRows(TABLE);
  expect(rows).toEqual([
    { firstId: 0, count: 3, address: 1000, lengthBytes: 10, stride: 16 },
    { firstId: 3, count: 1, address: 5000, lengthBytes: 20, stride: 32 },
    { firstId: 4, count: 5, address: 9000, lengthBytes: 30, stride: 64 },
  ]);
  const found = Array.from({ length: 9 }, (_, id) => {
    const index = rowIndexOf(rows, id);
    const row = rows[index];
    return row === undefined ? undefined : [index, addressOf(row, id)];
  });
  expect(found).toEqual([
    [0, 1000],
    [0, 1016],
    [0, 1032],
    [1, 5000],
    [2, 9000],
    [2, 9064],
    [2, 9128],
    [2, 9192],
    [2, 9256],
  ]);
  expect([rowIndexOf(rows, -1), rowIndexOf(rows, 100)]).toEqual([0, 2]);
});
