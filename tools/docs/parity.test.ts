import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { expect, test } from "vitest";
import { root } from "../repository/source-files.js";

// docs/parity.md names the test that shows each row.
const rows = readFileSync(join(root, "docs/parity.md"), "utf8")
  .split("\n")
  .filter((line) => line.startsWith("| ") && !/^\| (---|in 0\.33|upstream) /.test(line))
  .map((line) => line.split(" | "));

test.each(rows.map((cells) => [cells[0] ?? "", cells] as const))("%s", (_, cells) => {
  const [, here = "", shown = ""] = cells;
  const tests = Array.from(shown.matchAll(/`([^`]+\.ts)` "([^"]+)"/g), ([, path = "", title = ""]) => ({
    path,
    title,
  }));
  if (tests.length === 0) expect(here).toMatch(/^Not yet: /);
  for (const { path, title } of tests) {
    expect(existsSync(join(root, path)), path).toBe(true);
    expect(readFileSync(join(root, path), "utf8"), `${path}: ${title}`).toContain(title);
  }
});

test("there are rows", () => expect(rows.length).toBeGreaterThan(15));
