// A long suite: bundles @kv/nixl in several places.
// Places in which the package runs: bundles, restricted processes, users without a home.
import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, symlinkSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { runInNewContext } from "node:vm";
import { nixlTransport } from "@kv/nixl";
import { ChildProcess, runInChild } from "@kv/program";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { build } from "esbuild";
import { afterAll, describe, expect, test, vi } from "vitest";
import { cacheFolder } from "../../src/library/cache-folder.js";
import { ADDON_OF_BUNDLES } from "../support/bundle.js";

const PACKAGE = fileURLToPath(new URL("../..", import.meta.url));
const folder = mkdtempSync(join(tmpdir(), "kv-nixl-places-"));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const READ = `
  const transport = nixlTransport({ checkMetadata: process.env.CHECKS === "1" });
  const [reader, owner] = [await transport.createAgent(), await transport.createAgent()];
  await reader.addRemote(await owner.localMetadata());
  await transport.close();
  console.log("read");
`;
/** Bundles a program as the README says, and runs it in a folder of its own. */
async function bundled(name: string, format: "esm" | "cjs", external: string[]) {
  const code =
    format === "esm"
      ? `import { nixlTransport } from "@kv/nixl";${READ}`
      : `const { nixlTransport } = require("@kv/nixl"); (async () => {${READ}})();`;
  const file = join(folder, `${name}.${format === "esm" ? "mjs" : "cjs"}`);
  await build({
    stdin: { contents: code, resolveDir: PACKAGE },
    outfile: file,
    bundle: true,
    format,
    platform: "node",
    target: "node20.19",
    logLevel: "error",
    external,
    ...(format === "esm"
      ? {
          banner: {
            js: 'import { createRequire as r } from "node:module"; const require = r(import.meta.url);',
          },
        }
      : { logOverride: { "empty-import-meta": "silent" } }),
  });
  return file;
}
const run = (args: string[], env: Record<string, string | undefined> = {}) =>
  spawnSync(process.execPath, args, {
    encoding: "utf8",
    timeout: 60_000,
    // pnpm names the folders of all packages.
    env: { ...process.env, NODE_PATH: "", ...ADDON_OF_BUNDLES, ...env },
  });

describe.skipIf(nixlMissing)(`N9: bundles (${nixlMissing ?? "found"})`, () => {
  test.each(["esm", "cjs"] as const)("esbuild to %s, all in one file", async (format) => {
    const file = await bundled("whole", format, []);
    expect(run([file])).toMatchObject({ status: 0, stdout: "read\n" });
    const checked = run([file], { CHECKS: "1" });
    expect(checked.status).not.toBe(0);
    expect(checked.stderr).toContain("a bundler has left it out");
    // It looks for the addon nowhere but in packages.
    const without = run([file], { KV_NIXL_ADDON: "" });
    expect(without.stderr).toContain("KV_ADDON_NOT_FOUND");
    expect(without.stderr).not.toContain("native/build/kv_nixl.node");
  });

  test("esbuild with @kv/nixl kept outside, also with checkMetadata", async () => {
    mkdirSync(join(folder, "beside/node_modules/@kv"), { recursive: true });
    symlinkSync(PACKAGE, join(folder, "beside/node_modules/@kv/nixl"));
    const file = await bundled("beside/outside", "esm", ["@kv/nixl"]);
    expect(run([file], { CHECKS: "1" })).toMatchObject({ status: 0, stdout: "read\n" });
  });
});

describe("restricted processes", () => {
  test("N7: a user without HOME and without an entry of /etc/passwd", () => {
    expect(cacheFolder({ XDG_CACHE_HOME: "/x" })).toBe("/x/kv-nixl");
    const program = `import(${JSON.stringify(join(PACKAGE, "dist/index.js"))}).then(async ({ findLibrary }) =>
      console.log(await findLibrary().catch((error) => error.code ?? error.message)))`;
    const env: Record<string, string | undefined> = { ...process.env, PATH: "" };
    for (const name of ["HOME", "XDG_CACHE_HOME", "KV_NIXL_LIBRARY", "NIXL_PREFIX"])
      delete env[name];
    const { stdout, stderr } = spawnSync(process.execPath, ["-e", program], {
      encoding: "utf8",
      uid: 54_321,
      env,
    });
    expect(stdout, stderr).not.toContain("homedir");
    expect(stdout.trim()).toMatch(/KV_LIBRARY_NOT_FOUND|libnixl_capi\.so/);
  });

  test("--no-addons and --permission are named, and not a package to install", () => {
    const program = `import(${JSON.stringify(join(PACKAGE, "dist/index.js"))}).then(({ nixlTransport }) =>
      nixlTransport().createAgent()).catch((error) => console.log(error.code, error.hint))`;
    const { stdout } = run(["--no-addons", "-e", program]);
    expect(stdout).toContain("KV_ADDON_NOT_FOUND start Node without --no-addons");
  });

  test("N8: a single executable application starts no copy of itself", async () => {
    vi.spyOn(process, "getBuiltinModule").mockReturnValue({ isSea: () => true } as never);
    try {
      expect(() => new ChildProcess({ module: "/x.js" })).toThrow("single executable application");
      expect(await runInChild({ module: "/x.js", timeoutMs: 1000 })).toMatchObject({
        kind: "crashed",
      });
    } finally {
      vi.restoreAllMocks();
    }
  });

  test.skipIf(nixlMissing)("N10: bytes and tables of another realm are taken", async () => {
    const transport = nixlTransport();
    const [reader, owner] = [await transport.createAgent(), await transport.createAgent()];
    const foreign = <T>(type: string, values: readonly number[]) =>
      runInNewContext(`(values) => ${type}.from(values)`)(values) as T;
    const [target, source] = [transport.allocate(8192), transport.allocate(8192)];
    source.bytes.fill(7);
    await reader.register(target);
    await owner.register(source);
    await reader.addRemote(foreign("Uint8Array", [...(await owner.localMetadata())]));
    const rows = (address: number) => ({
      memoryType: "DRAM" as const,
      rows: foreign<Float64Array>("Float64Array", [address, 4096, 0, 4096, 2]),
    });
    const local = await reader.prepareLocal(rows(target.address));
    const remote = await reader.prepareRemote(owner.name, rows(source.address));
    const ids = foreign<Int32Array>("Int32Array", [0]);
    const notification = foreign<Uint8Array>("Uint8Array", [1, 2]);
    await reader.transfer({
      operation: "READ",
      local,
      localIds: ids,
      remote,
      remoteIds: ids,
      notification,
    }).done;
    const runs = foreign<Int32Array>("Int32Array", [1, 1, 1]);
    await reader.transfer({ operation: "READ", local, runs, remote }).done;
    expect(target.bytes.every((byte) => byte === 7)).toBe(true);
    await target.scatter(
      Float64Array.of(0, 4),
      foreign<Uint8Array>("Uint8Array", [1, 2, 3, 4]).buffer as ArrayBuffer,
    );
    await reader.notify(owner.name, notification);
    await transport.close();
    for (const memory of [target, source]) memory.close();
  });
});
