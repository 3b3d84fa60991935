// A long suite: a benchmark's own test.
import { expect, test } from "vitest";
import { type Run, withRun } from "./record.js";
import { alone } from "./report.js";

const run = (machine: string, date: string, names: string): Run => ({
  date,
  machine,
  command: "",
  kernel: "",
  node: "",
  nixl: "",
  load: { before: 0, after: 0 },
  rows: [...names].map((name) => alone(name, date)),
});
const shown = (runs: readonly Run[]) =>
  runs.map(
    ({ machine, date, rows }) => `${machine} ${date}: ${rows.map(({ what }) => what).join("")}`,
  );
const before = [run("x", "monday", "abc"), run("y", "monday", "abc")];

test("a whole run takes the place of its machine's runs, and a part that of its own rows", () => {
  expect(shown(withRun(before, run("x", "friday", "ad"), false))).toEqual([
    "y monday: abc",
    "x friday: ad",
  ]);
  const part = withRun(before, run("x", "friday", "b"), true);
  expect(shown(part)).toEqual(["x monday: ac", "y monday: abc", "x friday: b"]);
  expect(shown(withRun(part, run("x", "sunday", "abc"), true))).toEqual([
    "y monday: abc",
    "x sunday: abc",
  ]);
});

test("two whole runs of a machine stay beside each other", () => {
  const two = withRun(before, run("x", "friday", "ad"), false, 2);
  expect(shown(two)).toEqual(["x monday: abc", "y monday: abc", "x friday: ad"]);
  const three = withRun(two, run("x", "sunday", "a"), false, 2);
  expect(shown(three)).toEqual(["y monday: abc", "x friday: ad", "x sunday: a"]);
});
