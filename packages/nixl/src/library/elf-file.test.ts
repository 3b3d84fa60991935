import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { afterAll, beforeAll, expect, test } from "vitest";
import { shortageOf } from "./elf-file.js";

const { sharedObjects = [] } = process.report.getReport() as { sharedObjects?: string[] };
const library = sharedObjects.find((path) => basename(path).startsWith("libc.so")) ?? "";
let folder = "";
let bytes = Buffer.alloc(0);

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "kv-elf-"));
  bytes = await readFile(library);
});
afterAll(() => rm(folder, { recursive: true, force: true }));

async function shortageAt(length: number) {
  const path = join(folder, `cut-${length}`);
  await writeFile(path, bytes.subarray(0, length));
  return shortageOf(path);
}

test("a whole library lacks nothing; cut off, what it has and needs", async () => {
  expect(await shortageOf(library)).toBeUndefined();
  const [half, most] = [await shortageAt(bytes.length >> 1), await shortageAt(30_000)];
  expect(most).toEqual({ found: 30_000, wanted: half?.wanted });
  // To the byte: what follows is not loaded.
  const wanted = most?.wanted ?? 0;
  expect(wanted).toBeLessThanOrEqual(bytes.length);
  expect(await shortageAt(wanted)).toBeUndefined();
  expect(await shortageAt(wanted - 1)).toEqual({ found: wanted - 1, wanted });
});

test("what the loader refuses by itself is its affair: a file of text, an empty one, half a header", async () => {
  for (const length of [0, 10, 64, 100]) expect(await shortageAt(length)).toBeUndefined();
  const text = join(folder, "text");
  await writeFile(text, "no library".repeat(100));
  expect(await shortageOf(text)).toBeUndefined();
  await expect(shortageOf(join(folder, "absent"))).rejects.toThrow(/ENOENT/);
});
