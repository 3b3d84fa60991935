import { readFileSync } from "node:fs";
import { join } from "node:path";
import { describe, expect, test } from "vitest";
import { root } from "../repository/source-files.js";
import { namedTests, namesNothing, notShown, PAGES } from "./named-tests.mjs";

// docs/field-reports.md: what others have reported, what happens here, and the tests that show it.
const page = readFileSync(join(root, "docs/field-reports.md"), "utf8");
const REPORT = /^\[`([\w.-]+)#(\d+)`\]\(https:\/\/github\.com\/[\w.-]+\/[\w.-]+\/issues\/(\d+)\)$/;
const OUTCOME = /^(Prevented|Mended|Refused by name|Named|Open)\b/;

const rows = page
  .split("\n")
  .filter((line) => line.startsWith("| ") && !/^\| (---|report) /.test(line))
  .map((line) => line.slice(2).replace(/ *\|$/, "").split(" | "));

test("each row has a report with its number, what happens there and here, and its tests", () => {
  expect(rows.length).toBeGreaterThanOrEqual(100);
  const wrong = rows.filter(([report = "", there = "", here = "", ...rest]) => {
    const [, , number, linked] = REPORT.exec(report) ?? [];
    return (
      number === undefined ||
      number !== linked ||
      there === "" ||
      !OUTCOME.test(here) ||
      rest.length > 1
    );
  });
  expect(wrong).toEqual([]);
});

test("no report has two rows", () => {
  const reports = rows.map(([report]) => report);
  expect(reports.filter((report, at) => reports.indexOf(report) !== at)).toEqual([]);
});

test("what happens here is shown by a test, or is open", () => {
  const shown = (cells: readonly string[]) => namedTests(cells[3] ?? "").length > 0;
  expect(rows.filter((cells) => !shown(cells) && !/^Open: /.test(cells[2] ?? ""))).toEqual([]);
  // Every name in the last column has the form that is checked.
  const quoted = rows.filter(
    ([, , , tests = ""]) => namedTests(tests).length !== (tests.match(/\.ts`/g) ?? []).length,
  );
  expect(quoted).toEqual([]);
});

test.each(PAGES)("each test that %s names is there", (path) => {
  const named = namedTests(readFileSync(join(root, path), "utf8"));
  expect(named).not.toEqual([]);
  expect(named.filter(namesNothing)).toEqual([]);
});

describe("npm test compares the names with its report", () => {
  const report = (status: string) => ({
    testResults: [
      {
        name: join(root, "tools/docs/parity.test.ts"),
        assertionResults: [{ fullName: "a b", status }],
      },
    ],
  });
  const named = (name: string, file = "tools/docs/parity.test.ts") => [{ file, name }];

  test.each<[string, ReturnType<typeof named>, string, boolean, number]>([
    ["a test that passed", named("b"), "passed", true, 0],
    ["a test that failed", named("b"), "failed", false, 1],
    ["a test that was skipped, in the whole run", named("b"), "skipped", true, 1],
    ["a test that was skipped", named("b"), "skipped", false, 0],
    ["a name that no test has", named("c"), "passed", false, 1],
    ["a file that did not run", named("b", "tools/docs/readme.long.test.ts"), "passed", false, 0],
    [
      "a file that did not run, in the whole run",
      named("b", "tools/docs/readme.long.test.ts"),
      "passed",
      true,
      1,
    ],
    ["a file that is not there", named("b", "tools/docs/gone.test.ts"), "passed", false, 1],
    [
      "tests that other files run",
      named("b", "tools/testing/src/groups/group-tests.ts"),
      "passed",
      true,
      0,
    ],
  ])("%s", (_, tests, status, whole, wrong) => {
    expect(notShown(tests, report(status), whole)).toHaveLength(wrong);
  });
});
