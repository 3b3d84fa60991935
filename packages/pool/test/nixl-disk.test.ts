import { mkdtemp, open, readdir, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { afterAll, beforeAll, describe, expect, it } from "vitest";
import { openPool, type PoolOptions } from "../src/index.js";

const BLOCK_BYTES = 100_000;
const key = (name: string) => Buffer.from(name);

describe.skipIf(nixlMissing !== undefined)("a pool with a file, through NIXL", () => {
  const transport = nixlTransport();
  let folder = "";

  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), "kv-pool-"));
  });
  afterAll(async () => {
    await transport.close();
    await rm(folder, { recursive: true });
  });

  const poolOf = (given: Partial<PoolOptions> = {}) =>
    openPool({
      transport,
      host: "127.0.0.1",
      port: 0,
      blockLengthBytes: BLOCK_BYTES,
      fingerprint: "f",
      hashSeed: "s",
      memoryBytes: 2 * BLOCK_BYTES,
      files: { folder, limitBytes: 2 ** 20 },
      ...given,
    });

  it("has its blocks again after it was closed, and refuses a damaged one", async () => {
    const first = await poolOf();
    for (const [at, name] of ["a", "b", "c"].entries()) {
      const before = at === 0 ? undefined : key(["a", "b"][at - 1] ?? "");
      const bytes = new Uint8Array(BLOCK_BYTES).fill(at + 1);
      expect(await first.blocks.put(key(name), before, bytes)).toBe(true);
    }
    expect(first.status()).toMatchObject({ blocks: 3, blocks_in_memory: 2, places: 9 });
    await first.close();

    const [file = ""] = await readdir(folder);
    const handle = await open(join(folder, file), "r+");
    const stride = 4096 + 102_400;
    await handle.write(Buffer.of(9), 0, 1, stride + 4096 + BLOCK_BYTES - 1);
    await handle.close();

    const second = await poolOf();
    expect(await second.blocks.pin([key("b"), key("c")])).toEqual([undefined, expect.any(Number)]);
    expect(second.status()).toMatchObject({ blocks: 1, damaged: 1, pinned: 1 });
    expect(second.blocks.has(key("a"))).toBe(true);
    await second.close();
  });

  it("keeps the blocks of another model apart", async () => {
    const other = await poolOf({ fingerprint: "another" });
    expect(other.status().blocks).toBe(0);
    await other.close();
    expect(await readdir(folder)).toHaveLength(2);
  });

  it("refuses a file that another pool has, and one too short for a block", async () => {
    const first = await poolOf();
    await expect(poolOf()).rejects.toMatchObject({ code: "KV_CONFIG_INVALID" });
    await first.close();
    await expect(poolOf({ files: { folder, limitBytes: 4096 } })).rejects.toMatchObject({
      code: "KV_CONFIG_INVALID",
    });
    await (await poolOf()).close();
  });
});
