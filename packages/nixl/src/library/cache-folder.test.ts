import { mkdir, mkdtemp, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterEach, beforeEach, expect, test } from "vitest";
import { makeInCache } from "./cache-folder.js";

let base = "";
beforeEach(async () => {
  base = await mkdtemp(join(tmpdir(), "kv-nixl-cache-"));
  await mkdir(join(base, "kv-nixl", "thing"), { recursive: true });
  await writeFile(join(base, "kv-nixl", "thing", "file"), "damaged");
});
afterEach(() => rm(base, { recursive: true, force: true }));

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

test("what is there stays, but for replace", async () => {
  await make("whole");
  expect(await content()).toBe("damaged");
  await make("whole", { replace: true });
  expect(await content()).toBe("whole");
  expect(await readdir(join(base, "kv-nixl"))).toEqual(["thing"]);
});

test("two that replace at once both end well; what fails leaves what was there", async () => {
  await Promise.all([make("one", { replace: true }), make("one", { replace: true })]);
  expect(await content()).toBe("one");
  await expect(make("", { replace: true })).rejects.toThrow("no network");
  expect(await content()).toBe("one");
  expect(await readdir(join(base, "kv-nixl"))).toEqual(["thing"]);
});
