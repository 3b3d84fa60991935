import { expect, test } from "vitest";
import { addressOf, descriptorRows, rowIndexOf } from "./descriptor-rows.js";

/** Rows of 3, 1 and 5 descriptors. */
const TABLE = {
  memoryType: "DRAM" as const,
  rows: Float64Array.from([1000, 10, 0, 16, 3, 5000, 20, 1, 32, 1, 9000, 30, 0, 64, 5]),
};

test("a table's rows know their first descriptor, and each descriptor is in one of them", () => {
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
