import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, test } from "vitest";
import { withCheckpoint } from "./checkpoint.js";
import { readWeight, type Weights } from "./weights.js";

const directory = scratchFolder();

const name = "model.safetensors";
const opened = (use: (weights: Weights) => Promise<void> = async () => {}) =>
  withCheckpoint(directory, [name], use);

async function write(header: unknown, data: Uint8Array, headerBytes?: number): Promise<void> {
  const json = Buffer.from(typeof header === "string" ? header : JSON.stringify(header));
  const prefix = Buffer.alloc(8);
  prefix.writeBigUInt64LE(BigInt(headerBytes ?? json.length));
  await writeFile(join(directory, name), Buffer.concat([prefix, json, data]));
}

test("F32, F16 and BF16 at any offset are read as float32", async () => {
  const data = new Uint8Array(2 + 8 + 4);
  data.set(new Uint8Array(Uint16Array.of(0x3c00).buffer));
  data.set(new Uint8Array(Float32Array.of(1.5, -2).buffer), 2);
  data.set(new Uint8Array(Uint16Array.of(0x3f80, 0xc040).buffer), 10);
  const header = {
    __metadata__: { format: "pt" },
    half: { dtype: "F16", shape: [1], data_offsets: [0, 2] },
    whole: { dtype: "F32", shape: [1, 2], data_offsets: [2, 10] },
    brain: { dtype: "BF16", shape: [2], data_offsets: [10, 14] },
    other: { dtype: "I8", shape: [1], data_offsets: [0, 1] },
  };
  await write(header, data);
  await opened(async (weights) => {
    const read = async (weight: string, shape: readonly number[]) => [
      ...(await readWeight(weights, weight, shape)),
    ];
    expect(await read("half", [1])).toEqual([1]);
    expect(await read("whole", [1, 2])).toEqual([1.5, -2]);
    expect(await read("brain", [2])).toEqual([1, -3]);
    expect(weights.byName.has("__metadata__")).toBe(false);
    for (const [weight, shape, message] of [
      ["other", [1], /is I8, not F32, F16, BF16/],
      ["absent", [1], /holds no weight named absent/],
      ["whole", [2, 1], /has the shape \[1, 2\], config.json implies \[2, 1\]/],
    ] as const)
      await expect(read(weight, shape)).rejects.toMatchObject({
        code: "KV_MODEL_UNSUPPORTED",
        message: expect.stringMatching(message),
      });
  });
});

const entry = (change: object) => ({
  a: { dtype: "F32", shape: [2], data_offsets: [0, 8], ...change },
});

test.each<[string, unknown, number | undefined, RegExp]>([
  ["a header that is not JSON", "{", undefined, /not JSON/],
  ["a header that is a list", [], undefined, /not a map/],
  ["a header longer than the file", {}, 1e9, /header of 1000000000 bytes/],
  [
    "an entry beyond the end",
    entry({ shape: [3], data_offsets: [0, 12] }),
    undefined,
    /0 to 12 of 8/,
  ],
  ["offsets in the wrong order", entry({ data_offsets: [8, 0] }), undefined, /8 to 0/],
  [
    "a length that does not fit the shape",
    entry({ shape: [3] }),
    undefined,
    /needs 12 bytes, has 8/,
  ],
  ["a negative size", entry({ shape: [-2] }), undefined, /entry a/],
])("refuses %s", async (_, header, headerBytes, message) => {
  await write(header, new Uint8Array(8), headerBytes);
  await expect(opened()).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
    message: expect.stringMatching(message),
  });
});

test("refuses an empty file", async () => {
  await writeFile(join(directory, name), "");
  await expect(opened()).rejects.toMatchObject({ code: "KV_CONFIG_INVALID" });
});
