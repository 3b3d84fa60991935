import { mkdir, readdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeEach, expect, onTestFinished, test } from "vitest";
import { makeInCache } from "./cache-folder.js";
import { reinstallHint } from "./library-package.js";

let base = "";
beforeEach(async () => {
  base = scratchFolder(onTestFinished);
  await mkdir(join(base, "kv-nixl", "thing"), { recursive: true });
  await writeFile(join(base, "kv-nixl", "thing", "file"), "damaged");
});

const make = (text: string, options?: { replace: boolean }) =>
  makeInCache(
    "thing",
    { XDG_CACHE_HOME: base },
    async (unpacked) => {
      if (text === "") throw new Error("no network");
      await writeFile(join(unpacked, "file"), text);
    },
    options,
  );
const content = () => readFile(join(base, "kv-nixl", "thing", "file"), "utf8");

test("an existing folder stays, unless replace is set", async () => {
  await make("whole");
  expect(await content()).toBe("damaged");
  await make("whole", { replace: true });
  expect(await content()).toBe("whole");
  expect(await readdir(join(base, "kv-nixl"))).toEqual(["thing"]);
});

test("two replacements at once both succeed; one that fails leaves the old folder", async () => {
  await Promise.all([make("one", { replace: true }), make("one", { replace: true })]);
  expect(await content()).toBe("one");
  await expect(make("", { replace: true })).rejects.toThrow("no network");
  expect(await content()).toBe("one");
  expect(await readdir(join(base, "kv-nixl"))).toEqual(["thing"]);
});

const environment = { XDG_CACHE_HOME: "/nowhere/cache" };
const ours = (folder: string) =>
  reinstallHint(`/nowhere/cache/kv-nixl/${folder}/.libs/libnixl_capi.so`, environment);

test("a hint for an installation in the cache names its version and CUDA", () => {
  const command = "install NIXL again: npx --no-install kv-nixl install --force";
  expect(ours("nixl-cu12-1.5.0-x86_64")).toBe(command);
  expect(ours("nixl-cu13-1.5.1-aarch64")).toBe(`${command} --version 1.5.1 --cuda 13`);
});

test("a hint for another place says to reinstall there, or to use the cache", () => {
  const hint = reinstallHint("/opt/nixl-cu12-1.5.0-x86_64/lib/libnixl_capi.so", environment);
  expect(hint).toContain(
    "where it came from, or use kv-nixl's own (npx --no-install kv-nixl install --force; unset KV_NIXL_LIBRARY and NIXL_PREFIX",
  );
  expect(reinstallHint("/usr/lib/libnixl_capi.so", environment)).toBe(hint);
});
