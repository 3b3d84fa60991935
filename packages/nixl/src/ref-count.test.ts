import { expect, test } from "vitest";
import { RefCount } from "./ref-count.js";

test("reports the first user and the end of the last one; a hold is released once", () => {
  const changes: boolean[] = [];
  const refCount = new RefCount((used) => changes.push(used));
  const release = refCount.hold();
  refCount.acquire();
  expect([refCount.count, changes]).toEqual([2, [true]]);
  release();
  release();
  expect([refCount.count, changes]).toEqual([1, [true]]);
  refCount.release();
  expect([refCount.count, changes]).toEqual([0, [true, false]]);
});
