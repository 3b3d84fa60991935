import { readFileSync } from "node:fs";
import { join } from "node:path";
import { expect, test } from "vitest";
import { root } from "../repository/source-files.js";
import { namedTests } from "./named-tests.mjs";

// docs/parity.md names the test that shows each row; field-reports.test.ts looks for each test.
const rows = readFileSync(join(root, "docs/parity.md"), "utf8")
  .split("\n")
  .filter((line) => line.startsWith("| ") && !/^\| (---|in 0\.33|upstream) /.test(line))
  .map((line) => line.split(" | "));

test.each(rows.map((cells) => [cells[0] ?? "", cells] as const))("%s", (_, cells) => {
  const [, here = "", shown = ""] = cells;
  if (namedTests(shown).length === 0) expect(here).toMatch(/^Not yet: /);
});

test("there are rows", () => expect(rows.length).toBeGreaterThan(15));

test("each row of what NIXL does to its process names a test", () => {
  const page = readFileSync(join(root, "docs/operate/host-process.md"), "utf8");
  const rowsOfPage = page.split("\n").filter((line) => /^\| (?!---|what )/.test(line));
  expect(rowsOfPage.length).toBeGreaterThan(12);
  expect(rowsOfPage.filter((row) => namedTests(row).length === 0)).toEqual([]);
});
