// A long suite: bundles @kv/nixl in several places.
// Places in which the package runs: bundles, restricted processes, users without a home.
import { execFileSync, spawnSync } from "node:child_process";
import { chmodSync, mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { runInNewContext } from "node:vm";
import type { Memory } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { benchReportSchema } from "@kv/nixl/reports";
import { ChildProcess, runInChild } from "@kv/program";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { builtProgram } from "@kv/testing/node-programs";
import { build } from "esbuild";
import { afterAll, describe, expect, test, vi } from "vitest";
import { wheelFor } from "../../src/install/wheels.js";
import { cacheFolder } from "../../src/library/cache-folder.js";
import { ADDON_OF_BUNDLES } from "../support/bundle.js";
import { pairOf } from "../support/pair.js";

const PACKAGE = fileURLToPath(new URL("../..", import.meta.url));
const folder = mkdtempSync(join(tmpdir(), "kv-nixl-places-"));
// Other users read it.
chmodSync(folder, 0o755);
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
  const withPackage = (use: string) =>
    `import(${JSON.stringify(join(PACKAGE, "dist/index.js"))}).then(${use})`;
  /** Not root, whom no mode stops, and without an entry of /etc/passwd. */
  const asNobody = (args: string[], env: Record<string, string>) =>
    spawnSync(process.execPath, args, { encoding: "utf8", uid: 54_321, env: { PATH: "", ...env } });

  test("N7: a user without HOME and without an entry of /etc/passwd", () => {
    expect(cacheFolder({ XDG_CACHE_HOME: "/x" })).toBe("/x/kv-nixl");
    const program = withPackage(`async ({ findLibrary }) =>
      console.log(await findLibrary().catch((error) => error.code ?? error.message))`);
    const { stdout, stderr } = asNobody(["-e", program], {});
    expect(stdout, stderr).not.toContain("homedir");
    expect(stdout.trim()).toMatch(/KV_LIBRARY_NOT_FOUND|libnixl_capi\.so/);
  });

  test("a read-only HOME: an installation in it is used as it is, and what needs a write is refused", () => {
    const home = join(folder, "read-only");
    const [wheel, cache] = [wheelFor("1.5.0", 12, process.arch), join(home, ".cache/kv-nixl")];
    const inside = join(cache, wheel.folder, wheel.folders[0] ?? "");
    mkdirSync(inside, { recursive: true });
    writeFileSync(join(inside, "libnixl_capi.so"), "");
    writeFileSync(join(cache, "selected"), `${wheel.folder}\n`);
    const install = (...args: string[]) =>
      asNobody([builtProgram("kv-nixl"), "install", ...args], { HOME: home });
    expect(install()).toMatchObject({ status: 0 });
    const { stderr } = install("--cuda", "13");
    expect(stderr).toContain("[KV_INSTALL_FAILED]");
    expect(stderr).toContain("set XDG_CACHE_HOME to a folder that can be written");
  });

  test.skipIf(nixlMissing)(
    "a seccomp filter that denies process_vm_readv: bytes arrive by another way",
    async () => {
      const program = join(folder, "without-vm-readv");
      const source = fileURLToPath(new URL("../children/without_vm_readv.c", import.meta.url));
      execFileSync(process.env["CC"] ?? "cc", [source, "-o", program]);
      const bench = [builtProgram("kv-nixl"), "bench", "--json", "--sizes", "1MiB"];
      const options = { encoding: "utf8", timeout: 120_000 } as const;
      const ran = spawnSync(program, [process.execPath, ...bench, "--rounds", "1"], options);
      expect(ran, ran.stderr).toMatchObject({ status: 0 });
      const { rows } = benchReportSchema.parse(JSON.parse(ran.stdout));
      expect(new Set(rows.map(({ operation }) => operation))).toEqual(new Set(["READ", "WRITE"]));
      expect(rows.every(({ consistent }) => consistent === true)).toBe(true);
    },
  );

  test("--no-addons and --permission are named, and not a package to install", () => {
    const program = withPackage(`({ nixlTransport }) =>
      nixlTransport().createAgent().catch((error) => console.log(error.code, error.hint))`);
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
    const { reader, owner, target, source, move, close } = await pairOf(
      nixlTransport(),
      8192,
      4096,
    );
    const foreign = <T>(type: string, values: readonly number[]) =>
      runInNewContext(`(values) => ${type}.from(values)`)(values) as T;
    source.bytes.fill(7);
    await reader.addRemote(foreign("Uint8Array", [...(await owner.localMetadata())]));
    const table = ({ address }: Memory) => ({
      memoryType: "DRAM" as const,
      rows: foreign<Float64Array>("Float64Array", [address, 4096, 0, 4096, 2]),
    });
    const local = await reader.prepareLocal(table(target));
    const remote = await reader.prepareRemote(owner.name, table(source));
    const ids = foreign<Int32Array>("Int32Array", [0]);
    const notification = foreign<Uint8Array>("Uint8Array", [1, 2]);
    await move("READ", ids, { local, remote, notification }).done;
    const runs = foreign<Int32Array>("Int32Array", [1, 1, 1]);
    await reader.transfer({ operation: "READ", local, runs, remote }).done;
    expect(target.bytes.every((byte) => byte === 7)).toBe(true);
    await target.scatter(
      Float64Array.of(0, 4),
      foreign<Uint8Array>("Uint8Array", [1, 2, 3, 4]).buffer as ArrayBuffer,
    );
    await reader.notify(owner.name, notification);
    await close();
  });
});
