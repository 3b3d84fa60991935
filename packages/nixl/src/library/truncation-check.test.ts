import { readFile, writeFile } from "node:fs/promises";
import { basename, join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, expect, test } from "vitest";
import { truncationOf } from "./truncation-check.js";

const { sharedObjects = [] } = process.report.getReport() as { sharedObjects?: string[] };
const library = sharedObjects.find((path) => basename(path).startsWith("libc.so")) ?? "";
const folder = scratchFolder();
let bytes = Buffer.alloc(0);

beforeAll(async () => {
  bytes = await readFile(library);
});

async function truncationAt(length: number) {
  const path = join(folder, `cut-${length}`);
  await writeFile(path, bytes.subarray(0, length));
  return truncationOf(path);
}

test("a complete library passes; a truncated one is reported with both lengths", async () => {
  expect(await truncationOf(library)).toBeUndefined();
  const [half, most] = [await truncationAt(bytes.length >> 1), await truncationAt(30_000)];
  expect(most).toEqual({ found: 30_000, wanted: half?.wanted });
  // Exact to the byte: the rest of the file is not loaded.
  const wanted = most?.wanted ?? 0;
  expect(wanted).toBeLessThanOrEqual(bytes.length);
  expect(await truncationAt(wanted)).toBeUndefined();
  expect(await truncationAt(wanted - 1)).toEqual({ found: wanted - 1, wanted });
});

test("files that the loader refuses by itself pass: text, an empty file, half a header", async () => {
  for (const length of [0, 10, 64, 100]) expect(await truncationAt(length)).toBeUndefined();
  const text = join(folder, "text");
  await writeFile(text, "no library".repeat(100));
  expect(await truncationOf(text)).toBeUndefined();
  await expect(truncationOf(join(folder, "absent"))).rejects.toThrow("ENOENT");
});
