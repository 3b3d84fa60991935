import { expect, test } from "vitest";
import { cachesOfSegments, numberSegments } from "./rank-geometry.js";

test("numbers a cache's segments from the second one on, and maps them back to the cache's name", () => {
  const told = ["l0", "l0", "l1", "l0", "l1", "l2"];
  const names = numberSegments(told);
  expect(names).toEqual(["l0", "l0 #2", "l1", "l0 #3", "l1 #2", "l2"]);
  expect(cachesOfSegments(names)).toEqual(told);
});

test("leaves a name that only looks numbered unchanged", () => {
  const names = ["l0", "l1 #2", "l0 #x", "#2", " #2"];
  expect(numberSegments(names)).toEqual(names);
  expect(cachesOfSegments(names)).toEqual(names);
});
