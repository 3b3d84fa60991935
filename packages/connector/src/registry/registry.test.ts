import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";
import { KvError } from "@kv/interface";
import { afterAll, beforeAll, expect, test } from "vitest";
import { connectorRegistry, registerConnector, resolveConnector } from "./registry.js";

const module = (name: string) => ({
  name,
  createScheduler: () => ({}) as never,
  createWorker: () => ({}) as never,
});

const failure = (promise: Promise<unknown>): Promise<KvError> =>
  promise.then(
    () => {
      throw new Error("it did not fail");
    },
    (error: KvError) => error,
  );

test("resolves a connector by its registered name, and loads it only then", async () => {
  const registry = connectorRegistry();
  let loads = 0;
  registry.register("a", async () => {
    loads += 1;
    return { default: module("default of a") };
  });
  registry.register("b", async () => ({ b: module("b by name"), default: module("default of b") }));
  registry.register("c", async () => module("c itself"));
  expect(loads).toBe(0);
  expect((await registry.resolve({ connector: "a" })).name).toBe("default of a");
  expect((await registry.resolve({ connector: "b" })).name).toBe("b by name");
  expect((await registry.resolve({ connector: "c" })).name).toBe("c itself");
  expect(registry.names()).toEqual(["a", "b", "c"]);
});

test("errors list the known connectors, and keep the cause", async () => {
  const registry = connectorRegistry();
  registry.register("a", async () => module("a"));
  registry.register("b", async () => module("b"));
  expect(() => registry.register("a", async () => module("a"))).toThrow(
    expect.objectContaining({ code: "KV_CONNECTOR_DUPLICATE" }),
  );
  const unknown = await failure(registry.resolve({ connector: "z" }));
  expect(unknown.code).toBe("KV_CONNECTOR_UNKNOWN");
  expect(unknown.message).toContain("known are a, b");
  const cause = new Error("no such file");
  registry.register("broken", () => Promise.reject(cause));
  const broken = await failure(registry.resolve({ connector: "broken" }));
  expect(broken).toMatchObject({ code: "KV_CONNECTOR_LOAD_FAILED", cause });
  expect(broken.message).toContain("no such file");
  registry.register("partial", async () => ({
    default: { name: "p", createWorker() {} },
    other: 1,
  }));
  const partial = await failure(registry.resolve({ connector: "partial" }));
  expect(partial.code).toBe("KV_CONNECTOR_LOAD_FAILED");
  expect(partial.message).toContain("lacks createScheduler");
  for (const nothing of [undefined, null, 5, {}]) {
    const empty = connectorRegistry({ importModule: async () => nothing });
    expect((await failure(empty.resolve({ connector: "x", modulePath: "y" }))).code).toBe(
      "KV_CONNECTOR_LOAD_FAILED",
    );
  }
});

test("registerConnector and resolveConnector use the registry of the process", async () => {
  registerConnector("of-this-test", async () => module("of-this-test"));
  expect((await resolveConnector({ connector: "of-this-test" })).name).toBe("of-this-test");
  expect(() => registerConnector("of-this-test", async () => undefined)).toThrow(
    expect.objectContaining({ code: "KV_CONNECTOR_DUPLICATE" }),
  );
});

let project: string;
const source = (name: string) =>
  `const connector = { name: ${JSON.stringify(name)}, createScheduler() {}, createWorker() {} };`;

/** A third party's project, with packages that this repository does not know. */
beforeAll(async () => {
  project = await mkdtemp(join(tmpdir(), "kv-registry-"));
  const files = {
    "node_modules/esm-connector/package.json": JSON.stringify({
      name: "esm-connector",
      type: "module",
      exports: { ".": { import: "./lib/index.js" }, "./sub": { default: "./lib/sub.js" } },
    }),
    "node_modules/esm-connector/lib/index.js": `${source("esm")} export default connector;`,
    "node_modules/esm-connector/lib/sub.js": `${source("sub")} export { connector as TheirConnector };`,
    "node_modules/cjs-connector/package.json": JSON.stringify({
      name: "cjs-connector",
      main: "main.js",
    }),
    "node_modules/cjs-connector/main.js": `${source("cjs")} module.exports = connector;`,
    "mine.mjs": `${source("mine")} export default connector;`,
    "throws.mjs": "throw new Error('at import');",
  };
  for (const [path, text] of Object.entries(files)) {
    await mkdir(dirname(join(project, path)), { recursive: true });
    await writeFile(join(project, path), text);
  }
});
afterAll(() => rm(project, { recursive: true, force: true }));

test("a module path takes precedence over the name, and is resolved from the application's directory", async () => {
  const registry = connectorRegistry({ directory: project });
  registry.register("TheirConnector", async () => module("registered"));
  const name = async (modulePath: string) =>
    (await registry.resolve({ connector: "TheirConnector", modulePath })).name;
  expect(await name("esm-connector")).toBe("esm");
  expect(await name("esm-connector/sub")).toBe("sub");
  expect(await name("cjs-connector")).toBe("cjs");
  expect(await name("./mine.mjs")).toBe("mine");
  expect(await name(join(project, "mine.mjs"))).toBe("mine");
  expect(await name(pathToFileURL(join(project, "mine.mjs")).href)).toBe("mine");
});

test.each([
  ["no-such-package"],
  ["./no-such-file.mjs"],
  ["esm-connector/hidden"],
  ["./throws.mjs"],
  ["node:fs"],
])("%s cannot be loaded, and the error says why", async (modulePath) => {
  const error = await failure(
    connectorRegistry({ directory: project }).resolve({ connector: "x", modulePath }),
  );
  expect(KvError.is(error, "KV_CONNECTOR_LOAD_FAILED")).toBe(true);
  expect(error.message).toContain(modulePath);
  expect(error.hint).toBeTruthy();
});
