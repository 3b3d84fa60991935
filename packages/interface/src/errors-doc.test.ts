import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { KV_ERROR_CODES } from "./errors.js";

const page = readFileSync(new URL("../../../docs/errors.md", import.meta.url), "utf8");
const rows = page
  .split("\n")
  .filter((line) => line.startsWith("| `KV_"))
  .map((line) => line.split("|").map((cell) => cell.trim()));

test("docs/errors.md has exactly one row for each code, in the order of the list", () => {
  expect(rows.map((cells) => cells[1])).toEqual(KV_ERROR_CODES.map((code) => `\`${code}\``));
});

test("each row says what happened, and what to do", () => {
  for (const cells of rows) {
    expect(cells).toHaveLength(5);
    for (const cell of cells.slice(2, 4)) expect(cell.length, cells[1]).toBeGreaterThan(10);
  }
});
