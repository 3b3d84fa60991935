import type { Memory } from "@kv/interface";
import { memoryTransport } from "@kv/transport-memory";
import fc from "fast-check";
import { expect, it } from "vitest";
import { type Content, TornDisk } from "../test/torn-disk.js";
import { BlockFile } from "./block-file.js";
import { BlockPool } from "./block-pool.js";

const BYTES = 64;

const NAMESPACE = { blockLengthBytes: BYTES, fingerprint: "f", hashSeed: "s" };

function poolOf(slots: number, disk?: (memory: Memory) => TornDisk) {
  const memory = memoryTransport().allocate(slots * BYTES);
  const file = disk && new BlockFile(disk(memory), NAMESPACE);
  const pool = new BlockPool({ memory, blockLengthBytes: BYTES, file });
  return { memory, pool };
}

const key = (name: string) => Buffer.from(name);
const bytes = (fill: number) => new Uint8Array(BYTES).fill(fill);

/** The key of the block before one of a prefix. */
const parentOf = (names: readonly string[], at: number) =>
  at === 0 ? undefined : key(names[at - 1] ?? "");
/** Puts the blocks of a prefix, one after another. */
async function putPrefix(pool: BlockPool, names: readonly string[]): Promise<boolean[]> {
  const put: boolean[] = [];
  for (const [at, name] of names.entries())
    put.push(await pool.put(key(name), parentOf(names, at), bytes(at)));
  return put;
}
const namesOf = (chain: number, length: number) =>
  Array.from({ length }, (_, at) => `${chain}-${at}`);
/** Those of some blocks that a pool has. */
const had = (pool: BlockPool, ...names: string[]) => names.filter((name) => pool.has(key(name)));

it("keeps the bytes of a block at its slot", async () => {
  const { memory, pool } = poolOf(4);
  await putPrefix(pool, ["a", "b"]);
  const [a, b, c] = await pool.pin([key("a"), key("b"), key("c")]);
  expect(c).toBeUndefined();
  expect(memory.view((a ?? 9) * BYTES, BYTES)).toEqual(bytes(0));
  expect(memory.view((b ?? 9) * BYTES, BYTES)).toEqual(bytes(1));
});

it("evicts the end of the prefix that was used least recently", async () => {
  const { pool } = poolOf(4);
  await putPrefix(pool, ["a", "b"]);
  await putPrefix(pool, ["x", "y"]);
  pool.unpin((await pool.pin([key("a"), key("b")])) as number[]);
  await putPrefix(pool, ["new"]);
  expect(had(pool, "a", "b", "x", "y", "new")).toEqual(["a", "b", "x", "new"]);
});

it("evicts no pinned block, and takes none when all are pinned", async () => {
  const { pool } = poolOf(2);
  await putPrefix(pool, ["a", "b"]);
  const pinned = (await pool.pin([key("a"), key("b")])) as number[];
  expect(await pool.put(key("c"), undefined, bytes(3))).toBe(false);
  pool.unpin(pinned);
  expect(await pool.put(key("c"), undefined, bytes(3))).toBe(true);
  expect(had(pool, "a", "b")).toEqual(["a"]);
});

it("takes no block without the one before it, and none twice", async () => {
  const { pool } = poolOf(2);
  expect(await pool.put(key("b"), key("a"), bytes(1))).toBe(false);
  expect(await pool.put(key("a"), undefined, bytes(1))).toBe(true);
  expect(await pool.put(key("a"), undefined, bytes(2))).toBe(false);
});

it("prefixes stay whole, whatever is put, used and pinned", async () => {
  const step = fc.record({
    chain: fc.integer({ min: 0, max: 4 }),
    length: fc.integer({ min: 1, max: 6 }),
    what: fc.constantFrom("put", "use", "pin", "unpin"),
  });
  await fc.assert(
    fc.asyncProperty(fc.array(step, { maxLength: 60 }), async (steps) => {
      const { pool } = poolOf(8);
      const pins: number[][] = [];
      const slotsOf = async (names: readonly string[]) =>
        (await pool.pin(names.map(key))).filter((slot) => slot !== undefined);
      for (const { chain, length, what } of steps) {
        const names = namesOf(chain, length);
        if (what === "put") await putPrefix(pool, names);
        else if (what === "use") pool.unpin(await slotsOf(names));
        else if (what === "pin") pins.push(await slotsOf(names));
        else pool.unpin(pins.pop() ?? []);
        for (let each = 0; each < 5; each += 1) {
          const held = namesOf(each, 6).map((name) => pool.has(key(name)));
          expect(held).toEqual([...held].sort((one, other) => Number(other) - Number(one)));
        }
        const slots = await slotsOf([0, 1, 2, 3, 4].flatMap((each) => namesOf(each, 6)));
        expect(new Set(slots).size).toBe(slots.length);
        pool.unpin(slots);
      }
      for (const each of pins) pool.unpin(each);
      expect(pool.status().pinned).toBe(0);
    }),
  );
});

it("keeps more blocks in a file than in memory, and brings them back", async () => {
  const { memory, pool } = poolOf(2, (held) => new TornDisk(held, BYTES, 6));
  expect(await putPrefix(pool, ["a", "b", "c", "d"])).toEqual([true, true, true, true]);
  expect(pool.status()).toMatchObject({ blocks: 4, blocks_in_memory: 2, blocks_in_file: 4 });
  for (const [at, name] of ["a", "b", "c", "d"].entries()) {
    const [slot = 9] = await pool.pin([key(name)]);
    expect(memory.view((slot ?? 9) * BYTES, BYTES)).toEqual(bytes(at));
    pool.unpin([slot as number]);
  }
  // Two pins of one block wait for the same read, and the third block finds no slot.
  const pins = await Promise.all([pool.pin([key("a"), key("b")]), pool.pin([key("a"), key("c")])]);
  expect(pins[0]?.[0]).toBe(pins[1]?.[0]);
  expect(pins[1]?.[1]).toBeUndefined();
  for (const pinned of pins) pool.unpin(pinned.filter((slot) => slot !== undefined));
  expect(pool.status().pinned).toBe(0);
});

it("evicts a whole prefix from its end when the file is full", async () => {
  const { pool } = poolOf(2, (memory) => new TornDisk(memory, BYTES, 3));
  await putPrefix(pool, ["a", "b", "c"]);
  await putPrefix(pool, ["x"]);
  expect(had(pool, "a", "b", "c", "x")).toEqual(["a", "b", "x"]);
  expect(pool.status()).toMatchObject({ evicted: 1, blocks_in_file: 3 });
});

it("never serves a damaged block, nor those that follow it", async () => {
  let disk: TornDisk | undefined;
  const { pool } = poolOf(1, (memory) => {
    disk = new TornDisk(memory, BYTES, 4);
    return disk;
  });
  await putPrefix(pool, ["a", "b", "c"]);
  disk?.content[1]?.bytes.fill(255, 3, 4);
  expect(await pool.pin([key("b")])).toEqual([undefined]);
  expect(had(pool, "a", "b", "c")).toEqual(["a"]);
  expect(pool.status()).toMatchObject({ damaged: 1, pinned: 0, blocks_in_file: 1 });
  expect(await pool.put(key("b"), key("a"), bytes(1))).toBe(true);
});

it("acknowledges nothing when the file cannot be written, and still serves it", async () => {
  const { pool } = poolOf(3, (memory) => {
    const disk = new TornDisk(memory, BYTES, 4);
    disk.error = new Error("no space left on device");
    return disk;
  });
  expect(await putPrefix(pool, ["a", "b"])).toEqual([false, false]);
  const pinned = await pool.pin([key("a"), key("b")]);
  expect(pinned).not.toContain(undefined);
  pool.unpin(pinned as number[]);
  expect(pool.status()).toMatchObject({ blocks: 2, blocks_in_file: 0, pinned: 0 });
});

it("after a loss of power at any moment: no acknowledged block is lost, and none is torn", async () => {
  const step = fc.record({ chain: fc.nat(3), length: fc.integer({ min: 1, max: 4 }) });
  const life = fc.record({
    steps: fc.array(step, { minLength: 1, maxLength: 8 }),
    turns: fc.nat(100),
    seed: fc.nat(),
  });
  const fillOf = (name: string) => Buffer.from(name).reduce((sum, byte) => sum + byte, 0) % 256;
  await fc.assert(
    fc.asyncProperty(fc.array(life, { minLength: 1, maxLength: 6 }), async (lives) => {
      let places: Content | undefined;
      for (const { steps, turns, seed } of lives) {
        const acknowledged = new Set<string>();
        let disk: TornDisk | undefined;
        const { pool } = poolOf(5, (held) => {
          disk = new TornDisk(held, BYTES, 7, places);
          return disk;
        });
        const put = async () => {
          for (const { chain, length } of steps) {
            const names = namesOf(chain, length);
            await Promise.all(
              names.map(async (name, at) => {
                // It may have been evicted.
                if (!pool.has(key(name))) acknowledged.delete(name);
                if (await pool.put(key(name), parentOf(names, at), bytes(fillOf(name))))
                  acknowledged.add(name);
              }),
            );
          }
        };
        const running = put();
        for (let turn = 0; turn < turns; turn += 1) await Promise.resolve();
        const kept = [...acknowledged].filter((name) => pool.has(key(name)));
        places = disk?.crash(seed);
        await running;
        expect(disk?.isOverwritten).toBe(false);

        const after = poolOf(5, (held) => new TornDisk(held, BYTES, 7, structuredClone(places)));
        for (let chain = 0; chain < 4; chain += 1)
          for (const name of namesOf(chain, 4)) {
            const [slot] = await after.pool.pin([key(name)]);
            if (kept.includes(name)) expect(slot, name).toBeDefined();
            if (slot === undefined) continue;
            const found = after.memory.view(slot * BYTES, BYTES);
            expect(found).toEqual(bytes(fillOf(name)));
            after.pool.unpin([slot]);
          }
      }
    }),
  );
});
