import { mkdir, readdir, stat, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeEach, expect, onTestFinished, test } from "vitest";
import { cachedDirectory, prepareModel } from "./prepare-model.js";

const checkpoint = fileURLToPath(new URL("../../fixtures/model/qwen2-bf16", import.meta.url));

let scratch = "";
beforeEach(() => {
  scratch = scratchFolder(onTestFinished);
});

test("concurrent calls build one model, which is reused", async () => {
  const all = await Promise.all(
    [1, 2, 3].map(() => prepareModel(undefined, { cacheDirectory: scratch })),
  );
  const [first] = all;
  expect(new Set(all.map(({ onnxPath }) => onnxPath)).size).toBe(1);
  expect(await readdir(scratch)).toHaveLength(1);
  const before = await stat(first?.onnxPath ?? "");
  await prepareModel(undefined, { cacheDirectory: scratch });
  expect((await stat(first?.onnxPath ?? "")).mtimeMs).toBe(before.mtimeMs);
  const other = await prepareModel(undefined, { cacheDirectory: scratch, tinyKvHeads: 2 });
  expect(other.onnxPath).not.toBe(first?.onnxPath);
});

test("a failed build leaves nothing behind", async () => {
  const failing = cachedDirectory(scratch, "key", async (draft) => {
    await writeFile(join(draft, "half"), "x");
    throw new Error("disk full");
  });
  await expect(failing).rejects.toThrow("disk full");
  expect(await readdir(scratch)).toEqual([]);
});

test("a checkpoint is converted once, and its directory is not changed", async () => {
  const before = await readdir(checkpoint);
  const messages: string[] = [];
  const options = {
    cacheDirectory: scratch,
    onProgress: (message: string) => messages.push(message),
  };
  const first = await prepareModel(checkpoint, options);
  expect(await prepareModel(checkpoint, options)).toEqual(first);
  expect(first).toMatchObject({ name: "qwen2-bf16", directory: checkpoint });
  expect(messages).toHaveLength(1);
  expect(await readdir(checkpoint)).toEqual(before);
});

test("an exported model is used unchanged, from either path", async () => {
  const home = join(scratch, "exported");
  await mkdir(join(home, "onnx"), { recursive: true });
  await writeFile(join(home, "config.json"), "{}");
  await writeFile(join(home, "onnx", "model.onnx"), "");
  expect((await prepareModel(home)).onnxPath).toBe(join(home, "onnx", "model.onnx"));
  await writeFile(join(home, "model.onnx"), "");
  expect((await prepareModel(home)).onnxPath).toBe(join(home, "model.onnx"));
});

test("names the file that a directory lacks", async () => {
  await expect(prepareModel(scratch)).rejects.toMatchObject({
    message: expect.stringContaining("no config.json"),
  });
  await writeFile(join(scratch, "config.json"), "{}");
  await expect(prepareModel(scratch)).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
    message: expect.stringContaining("model.safetensors"),
  });
  await expect(prepareModel(checkpoint, { tinyKvHeads: 2 })).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
  });
});
