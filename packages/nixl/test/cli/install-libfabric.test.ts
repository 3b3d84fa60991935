import { execFile } from "node:child_process";
import { chmod, copyFile, mkdir, mkdtemp, readdir, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { companionsOf, variablesFor } from "../../src/backends/plugin-dependencies.js";
import { preloadFor } from "../../src/backends/preload.js";
import { installLibfabric } from "../../src/install/install-libfabric.js";
import { compileLibcudaStandIn } from "../../src/install/libcuda-stub.js";
import { missingParts } from "../../src/library/missing-parts.js";

// A plugin that needs CUDA's driver as NIXL's does, and a library that stands for the driver of a machine with a GPU.
const DRIVER = "libcuda.so.1";
const OTHER = "libkv_other.so.1";
const CALLED = ["cuInit", "cuCtxSetCurrent", "cuDeviceGetPCIBusId", "cuPointerGetAttributes"];
const FOLDER = "libfabric-2.4-x86_64";

const works = process.platform === "linux" && process.arch === "x64";
let made = "";
let driverOfThisMachine = false;

/** Compiles a shared library that has some functions and calls those of others. */
async function compile(name: string, { has = [], calls = [], needs = [] }: Record<string, string[]>) {
  const source = join(made, `${name}.c`);
  const body = calls.map((called) => `int ${called}(void);`).join("\n");
  const caller = `int kv_call(void) { return ${[...calls.map((called) => `${called}()`), "0"].join(" + ")}; }`;
  const functions = has.map((one) => `int ${one}(void) { return 0; }`).join("\n");
  await writeFile(source, `${body}\n${calls.length > 0 ? caller : ""}\n${functions}\n`);
  const file = join(made, name);
  const linked = needs.map((library) => join(made, library));
  await promisify(execFile)("cc", ["-shared", "-fPIC", `-Wl,-soname,${name}`, "-o", file, source, ...linked]);
  return file;
}

describe.runIf(works)("what LIBFABRIC needs and kv-nixl install brings", () => {
  let folder = "";
  let environment: Record<string, string> = {};
  let lines: string[] = [];
  const libraryPath = "/nowhere/libnixl_capi.so";
  const cache = () => join(folder, "cache", "kv-nixl");
  const brought = (file: string) => join(cache(), FOLDER, file);
  const installs = () =>
    installLibfabric({ libraryPath, environment, onProgress: (line) => lines.push(line) });
  const preloads = () => preloadFor("LIBFABRIC", libraryPath, environment);
  const filesBrought = () => readdir(join(cache(), FOLDER)).catch(() => []);

  /** NIXL's LIBFABRIC plugin is this one from here on. */
  const hasPlugin = (file: string) =>
    copyFile(join(made, file), join(folder, "plugins", "libplugin_LIBFABRIC.so"));
  /** The system has the driver's library from here on. */
  async function getsDriver() {
    await mkdir(join(folder, "driver"));
    await copyFile(join(made, DRIVER), join(folder, "driver", DRIVER));
    environment = { ...environment, LD_LIBRARY_PATH: join(folder, "driver") };
  }

  beforeAll(async () => {
    made = await mkdtemp(join(tmpdir(), "kv-nixl-made-"));
    await compile(DRIVER, { has: CALLED });
    await compile(OTHER, { has: ["kv_other"] });
    const plugin = await compile("plugin.so", { calls: CALLED, needs: [DRIVER] });
    await compile("plugin-of-both.so", { calls: [...CALLED, "kv_other"], needs: [DRIVER, OTHER] });
    driverOfThisMachine = (await missingParts(plugin)).length === 0;
  });
  afterAll(() => rm(made, { recursive: true, force: true }));

  beforeEach(async () => {
    folder = await mkdtemp(join(tmpdir(), "kv-nixl-libfabric-"));
    await mkdir(join(folder, "plugins"));
    environment = {
      PATH: process.env["PATH"] ?? "",
      XDG_CACHE_HOME: join(folder, "cache"),
      NIXL_PLUGIN_DIR: join(folder, "plugins"),
    };
    lines = [];
  });
  afterEach(() => rm(folder, { recursive: true, force: true }));

  test("without a driver: a stand-in for its library, which is loaded before the plugin", async (context) => {
    context.skip(driverOfThisMachine, "this machine has a driver");
    await hasPlugin("plugin.so");
    expect(await preloads()).toEqual({ libraries: [], variables: [] });
    await installs();
    expect(lines.join("\n")).toContain("no NVIDIA driver: compiling a stand-in that knows no device");
    expect(await filesBrought()).toEqual([DRIVER]);
    expect(await companionsOf("LIBFABRIC", environment)).toEqual({ folder: join(cache(), FOLDER) });
    expect(await preloads()).toEqual({ libraries: [brought(DRIVER)], variables: [] });
  });

  test("with a driver: nothing is compiled", async () => {
    await hasPlugin("plugin.so");
    await getsDriver();
    await installs();
    expect(lines).toEqual(["LIBFABRIC loads: nothing to do (all of the system's own)"]);
    expect(await filesBrought()).toEqual([]);
  });

  test("a driver that comes later is not shadowed by the stand-in", async (context) => {
    context.skip(driverOfThisMachine, "this machine has a driver");
    await hasPlugin("plugin.so");
    await installs();
    await getsDriver();
    expect(await filesBrought()).toEqual([DRIVER]);
    expect(await preloads()).toEqual({ libraries: [], variables: [] });
  });

  test("a driver is not shadowed either where another library is brought", async () => {
    await hasPlugin("plugin-of-both.so");
    await mkdir(join(cache(), FOLDER), { recursive: true });
    for (const file of [DRIVER, OTHER]) await copyFile(join(made, file), brought(file));
    await getsDriver();
    expect(await preloads()).toEqual({ libraries: [brought(OTHER)], variables: [] });
  });

  test("with a driver, an installation that is short of another library compiles nothing, names it and leaves nothing", async () => {
    await hasPlugin("plugin-of-both.so");
    await getsDriver();
    await expect(installs()).rejects.toMatchObject({
      code: "KV_INSTALL_FAILED",
      message: `LIBFABRIC still lacks ${OTHER}`,
    });
    expect(lines).toEqual([]);
    expect(await readdir(cache())).toEqual([]);
  });

  test("without the plugin: the folder where it was looked for", async () => {
    await expect(installs()).rejects.toMatchObject({
      code: "KV_INSTALL_FAILED",
      message: expect.stringContaining(join(folder, "plugins")),
    });
  });

  test("the stand-in without a compiler: which were tried, and what to install", async () => {
    const noCompiler = { ...environment, PATH: folder };
    await expect(compileLibcudaStandIn(folder, folder, noCompiler)).rejects.toMatchObject({
      code: "KV_INSTALL_FAILED",
      message: expect.stringContaining("tried cc, gcc, clang"),
      hint: expect.stringContaining("apt-get install gcc"),
    });
  });

  test("the stand-in with a compiler that fails: its last words", async () => {
    const CC = join(folder, "my-cc");
    await writeFile(CC, "#!/bin/sh\necho no room >&2; exit 1\n");
    await chmod(CC, 0o755);
    await expect(compileLibcudaStandIn(folder, folder, { ...environment, CC })).rejects.toMatchObject({
      code: "KV_INSTALL_FAILED",
      message: `${CC} could not compile a stand-in for libcuda.so.1: no room`,
    });
  });

  test("the newest of what was brought counts, and only for the backend that it is for", async () => {
    for (const version of ["2.4", "2.10", "2.9"])
      await mkdir(join(cache(), `libfabric-${version}-x86_64`), { recursive: true });
    expect(await companionsOf("LIBFABRIC", environment)).toEqual({
      folder: join(cache(), "libfabric-2.10-x86_64"),
    });
    expect(await companionsOf("UCX", environment)).toBeUndefined();
    expect(await companionsOf("constructor", environment)).toBeUndefined();
  });

  test("libfabric is told where its providers are only where it is the one that was brought", () => {
    const companions = { folder: "/brought" };
    expect(variablesFor(companions, ["libcuda.so.1", "libfabric.so.1"])).toEqual([
      ["FI_PROVIDER_PATH", "/brought"],
    ]);
    expect(variablesFor(companions, ["libcuda.so.1"])).toEqual([]);
  });
});
