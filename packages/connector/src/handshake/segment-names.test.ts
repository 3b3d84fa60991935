import { expect, test } from "vitest";
import { cachesOfSegments, numberSegments } from "./segment-names.js";

test("segments of one cache are numbered from the second on, and told under its name again", () => {
  const told = ["l0", "l0", "l1", "l0", "l1", "l2"];
  const names = numberSegments(told);
  expect(names).toEqual(["l0", "l0 #2", "l1", "l0 #3", "l1 #2", "l2"]);
  expect(cachesOfSegments(names)).toEqual(told);
});

test("a name that only looks numbered stays as it is", () => {
  const names = ["l0", "l1 #2", "l0 #x", "#2", " #2"];
  expect(numberSegments(names)).toEqual(names);
  expect(cachesOfSegments(names)).toEqual(names);
});
