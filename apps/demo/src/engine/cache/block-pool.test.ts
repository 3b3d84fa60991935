import { KvError } from "@kv/interface";
import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { BlockPool, blockHashes, chooseRuns, runsOf } from "./block-pool.js";

const tokens = (count: number, seed = 0) =>
  Array.from({ length: count }, (_, i) => (i * 7 + seed) % 1000);

describe("block hashes", () => {
  it("change with any earlier token, because each includes its parent", () => {
    const a = blockHashes(tokens(40), 16);
    expect(a).toHaveLength(2);
    const changed = tokens(40);
    changed[3] = 999;
    const b = blockHashes(changed, 16);
    expect(b[0]).not.toBe(a[0]);
    expect(b[1]).not.toBe(a[1]);
    const tail = tokens(40);
    tail[39] = 999;
    expect(blockHashes(tail, 16)).toEqual(a);
  });
});

describe("runs", () => {
  it("chooses the shortest run that fits, else the longest runs first", () => {
    expect(runsOf([1, 2, 5, 6, 7])).toEqual([
      [1, 2],
      [5, 6, 7],
    ]);
    expect(chooseRuns([1, 2, 3, 4, 8, 9], 2)).toEqual([8, 9]);
    expect(chooseRuns([1, 2, 5, 6, 7, 10], 4)).toEqual([5, 6, 7, 1]);
  });
});

describe("block pool", () => {
  it("never gives the null block, and refuses a request for too many blocks without taking any", () => {
    const pool = new BlockPool({ numBlocks: 5 });
    expect(pool.capacity).toBe(4);
    expect(() => pool.allocate(5)).toThrow(
      expect.objectContaining({
        code: "KV_OUT_OF_BLOCKS",
        details: { asked: 5, free: 4, capacity: 4 },
      }),
    );
    expect(pool.free).toBe(4);
    const all = pool.allocate(4);
    expect(all).not.toContain(0);
  });

  it("finds the content of freed blocks by hash until they are evicted, the oldest first", () => {
    const pool = new BlockPool({ numBlocks: 7 });
    const hashes = blockHashes(tokens(48), 16);
    const blocks = pool.allocate(3);
    pool.cachePrefix(blocks, hashes, []);
    pool.release(blocks);
    expect(pool.held).toBe(0);
    const again = pool.lookup(hashes);
    expect(again).toEqual(blocks);
    expect(pool.held).toBe(3);
    pool.release(again);
    // Three empty blocks are left. The fourth is evicted: the last block of the prompt.
    pool.allocate(4);
    const prefix = pool.lookup(hashes);
    expect(prefix).toEqual(blocks.slice(0, 2));
  });

  it("shares a prefix: a block is free when its last reference is released", () => {
    const pool = new BlockPool({ numBlocks: 4 });
    const [first = 0] = pool.allocate(1);
    pool.cachePrefix([first], ["h"], []);
    expect(pool.lookup(["h", "unknown"])).toEqual([first]);
    pool.release([first]);
    expect(pool.free).toBe(2);
    pool.release([first]);
    expect(pool.free).toBe(3);
    expect(() => pool.release([first])).toThrow(/no request holds/);
  });

  it("forgets the content of a block when it is allocated again, not when it is looked up again", () => {
    const pool = new BlockPool({ numBlocks: 2 });
    const [id = 0] = pool.allocate(1);
    pool.cachePrefix([id], ["h"], []);
    pool.release([id]);
    pool.release(pool.lookup(["h"]));
    expect(pool.allocate(1)).toEqual([id]);
    expect(pool.lookup(["h"])).toEqual([]);
  });

  it("allocates a freed run of blocks as one run", () => {
    const pool = new BlockPool({ numBlocks: 65 });
    const requests = Array.from({ length: 8 }, () => pool.allocate(8));
    pool.release(requests[2] ?? []);
    pool.release(requests[5] ?? []);
    expect(runsOf(pool.allocate(8))).toHaveLength(1);
  });

  it("counts held and free blocks correctly under any sequence of calls", () => {
    const step = fc.oneof(
      fc.record({
        kind: fc.constant("take" as const),
        prompt: fc.nat(5),
        blocks: fc.integer({ min: 1, max: 6 }),
      }),
      fc.record({ kind: fc.constant("drop" as const), index: fc.nat(20) }),
    );
    fc.assert(
      fc.property(
        fc.integer({ min: 2, max: 24 }),
        fc.array(step, { maxLength: 60 }),
        (numBlocks, steps) => {
          const pool = new BlockPool({ numBlocks });
          const alive: number[][] = [];
          const content = new Map<number, string>();
          for (const s of steps) {
            if (s.kind === "take") {
              const hashes = blockHashes(tokens(s.blocks * 4, s.prompt), 4);
              const hit = pool.lookup(hashes);
              // A lookup finds only what was stored under the same hashes.
              hit.forEach((id, i) => {
                expect(content.get(id)).toBe(hashes[i]);
              });
              try {
                const fresh = pool.allocate(s.blocks - hit.length);
                const blocks = [...hit, ...fresh];
                expect(new Set(blocks).size).toBe(blocks.length);
                for (const other of alive) {
                  for (const id of fresh) expect(other).not.toContain(id);
                }
                fresh.forEach((id, i) => {
                  const hash = hashes[hit.length + i] ?? "";
                  content.set(id, hash);
                  pool.cachePrefix([id], [hash], []);
                });
                alive.push(blocks);
              } catch (error) {
                if (!KvError.is(error, "KV_OUT_OF_BLOCKS")) throw error;
                pool.release(hit);
              }
            } else if (s.kind === "drop" && alive.length > 0) {
              const [gone] = alive.splice(s.index % alive.length, 1);
              pool.release(gone ?? []);
            }

            const held = new Set(alive.flat());
            expect(held.has(0)).toBe(false);
            expect(pool.held).toBe(held.size);
            expect(pool.free + pool.held).toBe(pool.capacity);
          }
          for (const blocks of alive) pool.release(blocks);
          expect(pool.held).toBe(0);
        },
      ),
      { numRuns: 200 },
    );
  });
});
