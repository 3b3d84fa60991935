import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { KvError, silentLog } from "@kv/interface";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, test } from "vitest";
import { addCacheKind, createPlatform, openTransport } from "./modules.js";

const folder = scratchFolder();

let count = 0;
function moduleWith(source: string): string {
  const path = join(folder, `m${count++}.mjs`);
  writeFileSync(path, source);
  return path;
}

test.each<[string, (path: string) => Promise<unknown>, string, RegExp]>([
  [
    "a transport",
    transportOf,
    "export const a = 1;",
    /its default export is no function that returns a Transport/,
  ],
  [
    "a transport",
    transportOf,
    "export default () => ({ allocate() {} });",
    /it lacks createAgent, close/,
  ],
  [
    "a platform",
    platformOf,
    "export default async () => null;",
    /it lacks kvCacheShape, maxModelLen, check/,
  ],
  ["a kind of cache", addCacheKind, "export default 4;", /its default export is no CacheKind/],
])("a module that has no %s is refused with the reason", async (_what, load, source, message) => {
  const path = moduleWith(source);
  const error = await load(path).catch((thrown: unknown) => thrown);
  expect(KvError.is(error, "KV_CONFIG_INVALID") && error.message).toMatch(message);
  expect((error as KvError).message).toContain(path);
});

test("a module that is not there is refused with what may be given", async () => {
  const error = await transportOf("not-installed").catch((thrown: unknown) => thrown);
  expect(KvError.is(error, "KV_CONFIG_INVALID") && error.message).toMatch(
    /^module not-installed: it could not be loaded/,
  );
  expect((error as KvError).hint).toContain("a package installed in");
});

test("an error of the module's own code keeps its code", async () => {
  const path = moduleWith(
    'export default () => { throw Object.assign(new Error("no card"), { mine: true }); };',
  );
  await expect(transportOf(path)).rejects.toMatchObject({ message: "no card", mine: true });
});

function transportOf(path: string) {
  return openTransport(path, { log: silentLog });
}

function platformOf(path: string) {
  return createPlatform(path, { log: silentLog });
}
