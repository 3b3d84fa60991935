import { expect, test } from "vitest";
import { RefCount } from "./ref-count.js";

test("reports when the first user arrives and when the last one leaves, and releases a hold only once", () => {
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
