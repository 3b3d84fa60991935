import { KvError } from "@kv/interface";
import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { blockHashes, chooseRuns, createBlockPool, NULL_BLOCK, runsOf } from "./block-pool.js";

const tokens = (count: number, seed = 0) => Array.from({ length: count }, (_, i) => (i * 7 + seed) % 1000);

describe("block hashes", () => {
  it("chain: a block's hash changes with any token before it", () => {
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
  it("takes the shortest run that fits, else the longest first", () => {
    expect(runsOf([1, 2, 5, 6, 7])).toEqual([
      { first: 1, length: 2 },
      { first: 5, length: 3 },
    ]);
    expect(chooseRuns([1, 2, 3, 4, 8, 9], 2)).toEqual([8, 9]);
    expect(chooseRuns([1, 2, 5, 6, 7, 10], 4)).toEqual([5, 6, 7, 1]);
  });
});

describe("block pool", () => {
  it("never gives the null block and refuses more than it has without taking any", () => {
    const pool = createBlockPool({ numBlocks: 5 });
    expect(pool.capacity).toBe(4);
    let error: unknown;
    try {
      pool.allocate(5);
    } catch (caught) {
      error = caught;
    }
    expect(KvError.is(error, "KV_OUT_OF_BLOCKS")).toBe(true);
    expect((error as KvError).details).toEqual({ asked: 5, free: 4, capacity: 4 });
    expect(pool.free).toBe(4);
    const all = pool.allocate(4);
    expect(all).not.toContain(NULL_BLOCK);
  });

  it("finds the content of freed blocks by hash until the room is needed, oldest gone first", () => {
    const pool = createBlockPool({ numBlocks: 7 });
    const hashes = blockHashes(tokens(48), 16);
    const blocks = pool.allocate(3);
    blocks.forEach((id, i) => {
      pool.cache(id, hashes[i] ?? "");
    });
    pool.release(blocks);
    expect(pool.held).toBe(0);
    const again = pool.lookup(hashes);
    expect(again).toEqual(blocks);
    expect(pool.held).toBe(3);
    pool.release(again);
    // Three empty blocks are left; the fourth must come from the cached ones, and that is the prompt's last.
    pool.allocate(4);
    const prefix = pool.lookup(hashes);
    expect(prefix).toEqual(blocks.slice(0, 2));
  });

  it("shares a prefix: a block is free only when its last holder has gone", () => {
    const pool = createBlockPool({ numBlocks: 4 });
    const [first = 0] = pool.allocate(1);
    pool.cache(first, "h");
    expect(pool.lookup(["h", "unknown"])).toEqual([first]);
    expect(pool.references(first)).toBe(2);
    pool.release([first]);
    expect(pool.free).toBe(2);
    pool.release([first]);
    expect(pool.free).toBe(3);
    expect(() => pool.release([first])).toThrow(/no request holds/);
  });

  it("moves a block's generation on when it is given out anew, not when it is taken up again", () => {
    const pool = createBlockPool({ numBlocks: 2 });
    const [id = 0] = pool.allocate(1);
    expect(pool.generation(id)).toBe(1);
    pool.cache(id, "h");
    pool.release([id]);
    pool.release(pool.lookup(["h"]));
    expect(pool.generation(id)).toBe(1);
    pool.allocate(1);
    expect(pool.generation(id)).toBe(2);
    expect(pool.lookup(["h"])).toEqual([]);
  });

  it("keeps the runs of requests that come and go together", () => {
    const pool = createBlockPool({ numBlocks: 65 });
    const requests = Array.from({ length: 8 }, () => pool.allocate(8));
    pool.release(requests[2] ?? []);
    pool.release(requests[5] ?? []);
    expect(runsOf(pool.allocate(8))).toHaveLength(1);
  });

  it("does not cache when told not to", () => {
    const pool = createBlockPool({ numBlocks: 3, prefixCaching: false });
    const [id = 0] = pool.allocate(1);
    pool.cache(id, "h");
    expect(pool.lookup(["h"])).toEqual([]);
  });

  it("keeps its books under any sequence of calls", () => {
    const step = fc.oneof(
      fc.record({
        kind: fc.constant("take" as const),
        prompt: fc.nat(5),
        blocks: fc.integer({ min: 1, max: 6 }),
      }),
      fc.record({ kind: fc.constant("drop" as const), index: fc.nat(20) }),
      fc.record({ kind: fc.constant("forget" as const) }),
    );
    fc.assert(
      fc.property(fc.integer({ min: 2, max: 24 }), fc.array(step, { maxLength: 60 }), (numBlocks, steps) => {
        const pool = createBlockPool({ numBlocks });
        const alive: { blocks: number[]; generations: number[] }[] = [];
        const content = new Map<number, string>();
        for (const s of steps) {
          if (s.kind === "take") {
            const hashes = blockHashes(tokens(s.blocks * 4, s.prompt), 4);
            const hit = pool.lookup(hashes);
            // What the lookup finds is what was stored under these very hashes.
            hit.forEach((id, i) => {
              expect(content.get(id)).toBe(hashes[i]);
            });
            try {
              const fresh = pool.allocate(s.blocks - hit.length);
              const blocks = [...hit, ...fresh];
              expect(new Set(blocks).size).toBe(blocks.length);
              for (const other of alive) {
                for (const id of fresh) expect(other.blocks).not.toContain(id);
              }
              fresh.forEach((id, i) => {
                const hash = hashes[hit.length + i] ?? "";
                content.set(id, hash);
                pool.cache(id, hash);
              });
              alive.push({ blocks, generations: blocks.map(pool.generation) });
            } catch (error) {
              if (!KvError.is(error, "KV_OUT_OF_BLOCKS")) throw error;
              pool.release(hit);
            }
          } else if (s.kind === "drop" && alive.length > 0) {
            const [gone] = alive.splice(s.index % alive.length, 1);
            pool.release(gone?.blocks ?? []);
          } else if (s.kind === "forget") pool.dropCache();

          const held = new Set(alive.flatMap((request) => request.blocks));
          expect(held.has(NULL_BLOCK)).toBe(false);
          expect(pool.held).toBe(held.size);
          expect(pool.free + pool.held).toBe(pool.capacity);
          for (const { blocks, generations } of alive)
            expect(blocks.map(pool.generation)).toEqual(generations);
          for (const id of held) {
            expect(pool.references(id)).toBe(alive.filter((request) => request.blocks.includes(id)).length);
          }
        }
        for (const { blocks } of alive) pool.release(blocks);
        expect(pool.held).toBe(0);
      }),
      { numRuns: 200 },
    );
  });
});
