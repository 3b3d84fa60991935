import type { KvCaches } from "@kv/interface";
import { expect, test } from "vitest";
import { StagingPool, stagingPoolBlocks } from "./staged-scheduler.js";

test("allocates all blocks of a request or none, consecutive ones if possible, and never block 0", () => {
  const pool = new StagingPool(9);
  expect(pool.take("a", [3])).toEqual([[1, 2, 3]]);
  expect(pool.take("b", [2, 1])).toEqual([[4, 5], [6]]);
  expect(pool.take("a", [3])).toEqual([[1, 2, 3]]);
  pool.free("a");
  expect(pool.take("c", [4])).toEqual([[1, 2, 3, 7]]);
  expect([pool.held, pool.waiting, pool.capacity]).toEqual([7, 0, 8]);
});

test("a request that does not fit waits, and blocks the requests behind it, until enough blocks are freed", () => {
  const pool = new StagingPool(5);
  const take = (id: string, count: number) => pool.take(id, [count]);
  const holders = () => ["a", "big", "small"].filter((id) => pool.of(id) !== undefined);
  expect(take("a", 3)).toEqual([[1, 2, 3]]);
  expect(take("big", 4)).toBeUndefined();
  expect(take("small", 1)).toBeUndefined();
  expect(take("big", 4)).toBeUndefined();
  expect([holders(), pool.waiting]).toEqual([["a"], 2]);
  expect(pool.take("a", [3])).toEqual([[1, 2, 3]]);
  pool.free("nobody");
  expect(holders()).toEqual(["a"]);
  pool.free("a");
  expect([holders(), pool.held]).toEqual([["big"], 4]);
  expect(take("big", 4)).toEqual([[1, 2, 3, 4]]);
  pool.free("big");
  expect(holders()).toEqual(["small"]);
});

test("freeing a waiting request serves the requests behind it", () => {
  const pool = new StagingPool(5);
  pool.take("a", [3]);
  pool.take("big", [4]);
  pool.take("small", [1]);
  pool.free("big");
  expect(pool.of("small")).toEqual([[4]]);
  expect(pool.waiting).toBe(0);
});

test("refuses a request for more than the whole pool with both numbers, and a pool without allocatable blocks", () => {
  expect(() => new StagingPool(5).take("r", [3, 2])).toThrowError(/needs 5 .* has 4/);
  expect(() => new StagingPool(1)).toThrowError(/none to allocate/);
});

test("a pool has as many blocks as fit into its bytes over all layers, two at least", () => {
  const regions = [{ blockLengthBytes: 10 }, { blockLengthBytes: 6 }];
  const blocks = (bytes: number) => stagingPoolBlocks({ regions } as unknown as KvCaches, bytes);
  expect([blocks(32), blocks(63)]).toEqual([2, 3]);
  expect(() => blocks(31)).toThrowError(/of 31 bytes holds 1 blocks of 16 bytes/);
});
