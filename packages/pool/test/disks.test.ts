import { open, readdir } from "node:fs/promises";
import { join } from "node:path";
import { nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { type ObjectStore, objectBackend, startObjectStore } from "@kv/testing/nixl/object-store";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { afterAll, beforeAll, describe, expect, it } from "vitest";
import { openPool, type PoolOptions } from "../src/index.js";

const BLOCK_BYTES = 100_000;
const key = (name: string) => Buffer.from(name);

describe.skipIf(nixlMissing !== undefined)("a pool through NIXL", () => {
  const transport = nixlTransport();
  const folder = scratchFolder();
  let store: ObjectStore;

  beforeAll(async () => {
    store = await startObjectStore();
  });
  afterAll(async () => {
    await transport.close();
    await store.close();
  });

  const poolOf = (given: Partial<PoolOptions>) =>
    openPool({
      transport,
      host: "127.0.0.1",
      port: 0,
      blockLengthBytes: BLOCK_BYTES,
      fingerprint: "f",
      hashSeed: "s",
      memoryBytes: 2 * BLOCK_BYTES,
      ...given,
    });
  const withFile = (given: Partial<PoolOptions> = {}) =>
    poolOf({ files: { folder, limitBytes: 2 ** 20 }, ...given });
  const withObjects = (limitBytes = 2 ** 20) =>
    poolOf({ objects: { parameters: objectBackend(store.port).parameters, limitBytes } });

  it.each([
    [
      "a file",
      9,
      withFile,
      async () => {
        const [file = ""] = await readdir(folder);
        const handle = await open(join(folder, file), "r+");
        const stride = 4096 + 102_400;
        await handle.write(Buffer.of(9), 0, 1, stride + 4096 + BLOCK_BYTES - 1);
        await handle.close();
      },
    ],
    [
      "an object store",
      10,
      withObjects,
      async () => {
        const [damaged = ""] = [...store.objects.keys()].filter((path) => path.endsWith("/1"));
        store.objects.get(damaged)?.fill(9, BLOCK_BYTES - 1);
      },
    ],
  ])(
    "with %s has its blocks again after it was closed, and refuses a damaged one",
    async (_, places, start, damage) => {
      const first = await start();
      for (const [at, name] of ["a", "b", "c"].entries()) {
        const before = at === 0 ? undefined : key(["a", "b"][at - 1] ?? "");
        const bytes = new Uint8Array(BLOCK_BYTES).fill(at + 1);
        expect(await first.blocks.put(key(name), before, bytes)).toBe(true);
      }
      expect(first.status()).toMatchObject({ blocks: 3, blocks_in_memory: 2, places });
      await first.close();
      await damage();

      const second = await start();
      expect(second.status()).toMatchObject({ blocks: 3, places });
      const found = await second.blocks.pin([key("b"), key("c")]);
      expect(found).toEqual([undefined, expect.any(Number)]);
      expect(second.status()).toMatchObject({ blocks: 1, damaged: 1, pinned: 1 });
      expect(second.blocks.has(key("a"))).toBe(true);
      await second.close();
    },
  );

  it("keeps the blocks of another model apart in a file", async () => {
    const other = await withFile({ fingerprint: "another" });
    expect(other.status().blocks).toBe(0);
    await other.close();
    expect(await readdir(folder)).toHaveLength(2);
  });

  it("refuses a file that another pool has, and one too short for a block", async () => {
    const first = await withFile();
    await expect(withFile()).rejects.toMatchObject({ code: "KV_CONFIG_INVALID" });
    await first.close();
    await expect(withFile({ files: { folder, limitBytes: 4096 } })).rejects.toMatchObject({
      code: "KV_CONFIG_INVALID",
    });
    await (await withFile()).close();
  });

  it("with an object store has its blocks with more places too, and is not taken for empty when the store fails for a moment", async () => {
    const [number = ""] = [...store.objects.keys()].filter((path) => path.endsWith("/places"));
    store.refuseOnce(number);
    const pool = await withObjects(2 ** 21);
    expect(pool.status()).toMatchObject({ blocks: 3, places: 20 });
    await pool.close();
  });

  it("refuses a store that keeps nothing, and a limit without a block", async () => {
    store.refuses = true;
    await expect(withObjects()).rejects.toMatchObject({ code: "KV_BACKEND_UNAVAILABLE" });
    store.refuses = false;
    await expect(withObjects(BLOCK_BYTES)).rejects.toMatchObject({ code: "KV_CONFIG_INVALID" });
  });
});
