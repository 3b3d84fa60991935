import { createHash } from "node:crypto";
import { readdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { strToU8, zipSync } from "fflate";
import { beforeEach, expect, onTestFinished, test } from "vitest";
import { refused } from "../../test/support/refused.js";
import { readVerified } from "./download-wheel.js";
import { unpackWheel } from "./unpack-wheel.js";

const wheelAt = async (path: string) => ({ path, bytes: await readFile(path) });

let folder = "";
beforeEach(async () => {
  folder = scratchFolder(onTestFinished);
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

test("unpacks the folders without benchmark tools and libtool files", async () => {
  const into = join(folder, "into");
  await unpackWheel({ wheel: await wheelAt(join(folder, "a.whl")), folders: [".libs"], into });
  expect((await readdir(into, { recursive: true })).sort()).toEqual([
    ".libs",
    ".libs/libnixl_capi.so",
    ".libs/plugins",
    ".libs/plugins/libplugin_UCX.so",
  ]);
  expect(await readFile(join(into, ".libs/libnixl_capi.so"), "utf8")).toBe(".libs/libnixl_capi.so");
});

test.each([
  ["a file that is no zip file is KV_INSTALL_FAILED", "no zip", "b.whl could not be unpacked"],
  [
    "A7: a member that would land outside of the folder is refused, and nothing is written",
    zipSync({ ".libs/a.so": strToU8("a"), ".libs/../../outside": strToU8("b") }),
    ".libs/../../outside",
  ],
])("%s", async (_, content, why) => {
  const [file, into] = [join(folder, "b.whl"), join(folder, "into")];
  await writeFile(file, content);
  const wheel = await wheelAt(file);
  const unpacks = () => unpackWheel({ wheel, folders: [".libs"], into });
  expect((await refused(unpacks, "KV_INSTALL_FAILED")).message).toContain(why);
  expect(await readdir(folder)).not.toContain("into");
});

test("A7: what is unpacked is what was verified, although the file has changed since", async () => {
  const path = join(folder, "a.whl");
  const sha256 = createHash("sha256")
    .update(await readFile(path))
    .digest("hex");
  const verified = await readVerified(path, { requirement: "a", platform: "any", sha256 }, "");
  await writeFile(path, zipSync({ ".libs/libnixl_capi.so": strToU8("another") }));
  const into = join(folder, "into");
  await unpackWheel({ wheel: verified, folders: [".libs"], into });
  expect(await readFile(join(into, ".libs/libnixl_capi.so"), "utf8")).toBe(".libs/libnixl_capi.so");
});
