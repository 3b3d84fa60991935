import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll, beforeAll, expect, test } from "vitest";
import { openSafetensors } from "./safetensors.js";

let directory = "";
beforeAll(async () => {
  directory = await mkdtemp(join(tmpdir(), "kv-safetensors-"));
});
afterAll(async () => {
  await rm(directory, { recursive: true });
});

let files = 0;
async function written(header: unknown, data: Uint8Array, headerBytes?: number): Promise<string> {
  const json = Buffer.from(typeof header === "string" ? header : JSON.stringify(header));
  const prefix = Buffer.alloc(8);
  prefix.writeBigUInt64LE(BigInt(headerBytes ?? json.length));
  const path = join(directory, `${files++}.safetensors`);
  await writeFile(path, Buffer.concat([prefix, json, data]));
  return path;
}

test("F32, F16 and BF16 at any offset are read as float32", async () => {
  const data = new Uint8Array(2 + 8 + 4);
  new Uint8Array(new Uint16Array([0x3c00]).buffer).forEach((byte, i) => {
    data[i] = byte;
  });
  data.set(new Uint8Array(Float32Array.of(1.5, -2).buffer), 2);
  data.set(new Uint8Array(Uint16Array.of(0x3f80, 0xc040).buffer), 10);
  const source = await openSafetensors(
    await written(
      {
        __metadata__: { format: "pt" },
        half: { dtype: "F16", shape: [1], data_offsets: [0, 2] },
        whole: { dtype: "F32", shape: [1, 2], data_offsets: [2, 10] },
        brain: { dtype: "BF16", shape: [2], data_offsets: [10, 14] },
        other: { dtype: "I8", shape: [1], data_offsets: [0, 1] },
      },
      data,
    ),
  );
  expect([...(await source.read("half"))]).toEqual([1]);
  expect([...(await source.read("whole"))]).toEqual([1.5, -2]);
  expect([...(await source.read("brain"))]).toEqual([1, -3]);
  expect(source.shape("whole")).toEqual([1, 2]);
  expect([source.has("whole"), source.has("__metadata__")]).toEqual([true, false]);
  await expect(source.read("other")).rejects.toMatchObject({ code: "KV_MODEL_UNSUPPORTED" });
  await expect(source.read("absent")).rejects.toMatchObject({ code: "KV_MODEL_UNSUPPORTED" });
  await source.close();
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
  const path = await written(header, new Uint8Array(8), headerBytes);
  await expect(openSafetensors(path)).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
    message: expect.stringMatching(message),
  });
});

test("refuses an empty file", async () => {
  const path = join(directory, "empty.safetensors");
  await writeFile(path, "");
  await expect(openSafetensors(path)).rejects.toMatchObject({ code: "KV_CONFIG_INVALID" });
});
