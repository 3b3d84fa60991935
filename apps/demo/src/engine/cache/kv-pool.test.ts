import { memoryTransport } from "@kv/transport-memory";
import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { kvBytes, kvShards } from "./kv-layout.js";
import { KvPool } from "./kv-pool.js";

const geometry = { layers: 2, kvHeads: 4, headDim: 2 };
const transport = memoryTransport();

function pool(tp: number, blockSize: number, numBlocks = 16) {
  return new KvPool({ transport, geometry, tp, blockSize, numBlocks });
}

/** Values that tell every token, head, layer and dimension apart. */
function numbered(tokens: number, first = 1): ArrayBuffer {
  return Float32Array.from({ length: kvBytes(geometry, tokens) / 4 }, (_, i) => first + i).buffer;
}

describe("shards of KV heads", () => {
  it("splits heads over ranks, and replicates them when there are more ranks", () => {
    expect(kvShards(4, 2).map(({ firstHead, headCount }) => [firstHead, headCount])).toEqual([
      [0, 2],
      [2, 2],
    ]);
    expect(kvShards(2, 4).map(({ firstHead }) => firstHead)).toEqual([0, 0, 1, 1]);
  });
  it("refuses head and rank counts when neither divides the other", () => {
    expect(() => kvShards(4, 3)).toThrow(/4 KV heads cannot be split over 3 ranks/);
  });
});

describe("KV pool", () => {
  it("stores a rank's blocks as [block][head][token][K and V]", async () => {
    const two = pool(2, 4);
    const kv = new Float32Array(numbered(6));
    await two.write({ blockIds: [5, 3], from: 0, count: 6 }, kv.buffer);
    const caches = two.caches[1];
    const region = caches?.regions[1];
    expect(region?.name).toBe("model.layers.1.self_attn.attn");
    expect(region?.blockLengthBytes).toBe(2 * 4 * 4 * 4);
    const floats = new Float32Array(region?.memory.bytes.buffer as ArrayBuffer);
    // Layer 1, head 3 (the second of rank 1), token 5 (the second of block 3).
    const at = (region?.offsetBytes ?? 0) / 4 + 3 * 32 + 1 * 16 + 1 * 4;
    const inKv = ((1 * 4 + 3) * 6 + 5) * 4;
    expect([...floats.subarray(at, at + 4)]).toEqual([...kv.subarray(inKv, inKv + 4)]);
  });

  it.each([1, 2, 4, 8])(
    "reads back the written KV, as a whole and in the written parts, over %i ranks",
    async (tp) => {
      const p = pool(tp, 4);
      const blockIds = [7, 2, 3];
      await p.write({ blockIds, from: 0, count: 5 }, numbered(5));
      await p.write({ blockIds, from: 5, count: 4 }, numbered(4, 1000));
      const whole = new Float32Array(await p.read({ blockIds, from: 0, count: 9 }));
      const first = new Float32Array(await p.read({ blockIds, from: 0, count: 5 }));
      expect(first).toEqual(new Float32Array(numbered(5)));
      expect(new Float32Array(await p.read({ blockIds, from: 5, count: 4 }))).toEqual(
        new Float32Array(numbered(4, 1000)),
      );
      expect(whole.length).toBe(9 * 2 * 4 * 4);
    },
  );

  it("has digests that depend on every byte but not on TP, block size or block ids", async () => {
    await fc.assert(
      fc.asyncProperty(
        fc.constantFrom(1, 2, 4, 8),
        fc.constantFrom(1, 2, 4, 8),
        fc.integer({ min: 1, max: 30 }),
        fc.shuffledSubarray([1, 2, 3, 4, 5, 6, 7, 8], { minLength: 8 }),
        async (tp, blockSize, tokens, ids) => {
          const plain = pool(1, 32);
          await plain.write({ blockIds: [1], from: 0, count: tokens }, numbered(tokens));
          const other = pool(tp, blockSize, 64);
          const blockIds = Array.from(
            { length: Math.ceil(tokens / blockSize) },
            (_, i) => (ids[i % 8] ?? 0) + 8 * Math.floor(i / 8),
          );
          const span = { blockIds, from: 0, count: tokens };
          await other.write(span, numbered(tokens));
          expect(await other.digests(span)).toEqual(
            await plain.digests({ blockIds: [1], from: 0, count: tokens }),
          );
          const changed = new Float32Array(numbered(tokens));
          changed[changed.length - 1] = 0;
          await other.write(span, changed.buffer);
          expect(await other.digests(span)).not.toEqual(
            await plain.digests({ blockIds: [1], from: 0, count: tokens }),
          );
        },
      ),
      { numRuns: 40 },
    );
  });

  it("reports ranks that hold different bytes of the same head", async () => {
    const p = pool(8, 4);
    const span = { blockIds: [1], from: 0, count: 4 };
    await p.write(span, numbered(4));
    const replica = p.caches[1]?.regions[0];
    if (replica !== undefined) replica.memory.bytes[replica.blockLengthBytes] = 99;
    await expect(p.digests(span)).rejects.toThrow(/different bytes/);
  });

  it("zeroes the tail of the last block and leaves the rest", async () => {
    const p = pool(2, 4);
    await p.write({ blockIds: [4, 5], from: 0, count: 8 }, numbered(8));
    await p.zeroTail([4, 5], 6);
    const zeros = async (from: number, count: number) =>
      new Float32Array(await p.read({ blockIds: [4, 5], from, count })).map((v) => Number(v === 0));
    expect(new Set(await zeros(6, 2))).toEqual(new Set([1]));
    expect(new Set(await zeros(0, 6))).toEqual(new Set([0]));
  });

  it("refuses block ids and lengths out of range", async () => {
    const p = pool(1, 4);
    for (const id of [16, 0])
      await expect(p.read({ blockIds: [id], from: 0, count: 1 })).rejects.toMatchObject({
        code: "KV_BLOCKS_OUT_OF_RANGE",
      });
    const mismatch = { code: "KV_BLOCKS_MISMATCH" };
    await expect(p.read({ blockIds: [1], from: 2, count: 3 })).rejects.toMatchObject(mismatch);
    const written = p.write({ blockIds: [1], from: 0, count: 2 }, numbered(3));
    await expect(written).rejects.toMatchObject(mismatch);
  });
});
