import { nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { type ObjectStore, objectBackend, startObjectStore } from "@kv/testing/nixl/object-store";
import { afterAll, beforeAll, describe, expect, it } from "vitest";
import { openPool } from "../src/index.js";

const BLOCK_BYTES = 100_000;
const key = (name: string) => Buffer.from(name);

describe.skipIf(nixlMissing !== undefined)("a pool with an object store, through NIXL", () => {
  const transport = nixlTransport();
  let store: ObjectStore;

  beforeAll(async () => {
    store = await startObjectStore();
  });
  afterAll(async () => {
    await transport.close();
    await store.close();
  });

  const poolOf = (limitBytes = 2 ** 20, port = store.port) =>
    openPool({
      transport,
      host: "127.0.0.1",
      port: 0,
      blockLengthBytes: BLOCK_BYTES,
      fingerprint: "f",
      hashSeed: "s",
      memoryBytes: 2 * BLOCK_BYTES,
      objects: { parameters: objectBackend(port).parameters, limitBytes },
    });

  it("has its blocks again after it was closed, also with more places, and refuses a damaged one", async () => {
    const first = await poolOf();
    for (const [at, name] of ["a", "b", "c"].entries()) {
      const before = at === 0 ? undefined : key(["a", "b"][at - 1] ?? "");
      const bytes = new Uint8Array(BLOCK_BYTES).fill(at + 1);
      expect(await first.blocks.put(key(name), before, bytes)).toBe(true);
    }
    expect(first.status()).toMatchObject({ blocks: 3, blocks_in_memory: 2, places: 10 });
    await first.close();

    const [damaged] = [...store.objects.keys()].filter((path) => path.endsWith("/1"));
    store.objects.get(damaged ?? "")?.fill(9, BLOCK_BYTES - 1);
    const second = await poolOf(2 ** 21);
    expect(second.status()).toMatchObject({ blocks: 3, places: 20 });
    expect(await second.blocks.pin([key("b"), key("c")])).toEqual([undefined, expect.any(Number)]);
    expect(second.status()).toMatchObject({ blocks: 1, damaged: 1, pinned: 1 });
    await second.close();
  });

  it("is not taken for empty when the store fails for a moment", async () => {
    const [number = ""] = [...store.objects.keys()].filter((path) => path.endsWith("/places"));
    store.refuseOnce(number);
    const pool = await poolOf(2 ** 21);
    expect(pool.status()).toMatchObject({ blocks: 3 });
    await pool.close();
  });

  it("refuses a store that keeps nothing, and a limit without a block", async () => {
    store.refuses = true;
    await expect(poolOf()).rejects.toMatchObject({ code: "KV_BACKEND_UNAVAILABLE" });
    store.refuses = false;
    await expect(poolOf(BLOCK_BYTES)).rejects.toMatchObject({ code: "KV_CONFIG_INVALID" });
  });
});
