import { execFile } from "node:child_process";
import { chmod, copyFile, mkdir, mkdtemp, readdir, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test, vi } from "vitest";
import { dependencyFolder, variablesFor } from "../../src/backends/plugins.js";
import { PreloadFinder } from "../../src/backends/preload.js";
import { compileLibcudaStub, installLibfabric } from "../../src/install/install-libfabric.js";
import { libraryPackage } from "../../src/library/library-package.js";
import { missingParts } from "../../src/library/missing-parts.js";

// The repository may have built the package of libraries, which these tests do not depend on.
vi.mock("../../src/library/library-package.js");

// A plugin that needs CUDA's driver as NIXL's plugin does, and a fake driver library.
const DRIVER = "libcuda.so.1";
const OTHER = "libkv_other.so.1";
const CALLED = ["cuInit", "cuCtxSetCurrent", "cuDeviceGetPCIBusId", "cuPointerGetAttributes"];
const FOLDER = "libfabric-2.5-x86_64";

const works = process.platform === "linux" && process.arch === "x64";
let made = "";
let driverOfThisMachine = false;

/** Compiles a shared library that defines some functions and calls others. */
async function compile(
  name: string,
  { has = [], calls = [], needs = [] }: Record<string, string[]>,
) {
  const source = join(made, `${name}.c`);
  const body = calls.map((called) => `int ${called}(void);`).join("\n");
  const caller = `int kv_call(void) { return ${[...calls.map((called) => `${called}()`), "0"].join(" + ")}; }`;
  const functions = has.map((one) => `int ${one}(void) { return 0; }`).join("\n");
  await writeFile(source, `${body}\n${calls.length > 0 ? caller : ""}\n${functions}\n`);
  const file = join(made, name);
  const linked = needs.map((library) => join(made, library));
  await promisify(execFile)("cc", [
    "-shared",
    "-fPIC",
    `-Wl,-soname,${name}`,
    "-o",
    file,
    source,
    ...linked,
  ]);
  return file;
}

describe.runIf(works)("dependencies of LIBFABRIC that kv-nixl install installs", () => {
  let folder = "";
  let environment: Record<string, string> = {};
  let lines: string[] = [];
  const libraryPath = "/nowhere/libnixl_capi.so";
  const cache = () => join(folder, "cache", "kv-nixl");
  const installed = (file: string) => join(cache(), FOLDER, file);
  const installs = () =>
    installLibfabric({ libraryPath, environment, onProgress: (line) => lines.push(line) });
  const preloads = () => new PreloadFinder().find("LIBFABRIC", libraryPath, environment);
  const installedFiles = () => readdir(join(cache(), FOLDER)).catch(() => []);

  /** Makes this file NIXL's LIBFABRIC plugin. */
  const hasPlugin = (file: string) =>
    copyFile(join(made, file), join(folder, "plugins", "libplugin_LIBFABRIC.so"));
  /** Gives the system the driver's library. */
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
    vi.mocked(libraryPackage).mockReturnValue({ name: "", path: undefined, folder: undefined });
  });
  afterEach(() => rm(folder, { recursive: true, force: true }));

  test("without a driver, compiles a stub of its library, which is loaded before the plugin", async (context) => {
    context.skip(driverOfThisMachine, "this machine has a driver");
    await hasPlugin("plugin.so");
    expect(await preloads()).toEqual({ libraries: [], variables: [] });
    await installs();
    expect(lines.join("\n")).toContain("no NVIDIA driver: compiling a stub that reports no device");
    expect(await installedFiles()).toEqual([DRIVER]);
    expect(await dependencyFolder("LIBFABRIC", environment)).toBe(join(cache(), FOLDER));
    expect(await preloads()).toEqual({ libraries: [installed(DRIVER)], variables: [] });
  });

  test("with a driver: nothing is compiled", async () => {
    await hasPlugin("plugin.so");
    await getsDriver();
    await installs();
    expect(lines).toEqual(["LIBFABRIC loads: nothing to do (with the system's libraries)"]);
    expect(await installedFiles()).toEqual([]);
  });

  test("a driver that is installed later is not shadowed by the stub", async (context) => {
    context.skip(driverOfThisMachine, "this machine has a driver");
    await hasPlugin("plugin.so");
    await installs();
    await getsDriver();
    expect(await installedFiles()).toEqual([DRIVER]);
    expect(await preloads()).toEqual({ libraries: [], variables: [] });
  });

  test("a driver is not shadowed when another library is installed with the stub", async () => {
    await hasPlugin("plugin-of-both.so");
    await mkdir(join(cache(), FOLDER), { recursive: true });
    for (const file of [DRIVER, OTHER]) await copyFile(join(made, file), installed(file));
    await getsDriver();
    expect(await preloads()).toEqual({ libraries: [installed(OTHER)], variables: [] });
  });

  test("with a driver, an installation that lacks another library compiles nothing, names it and leaves no files", async () => {
    await hasPlugin("plugin-of-both.so");
    await getsDriver();
    await expect(installs()).rejects.toMatchObject({
      code: "KV_INSTALL_FAILED",
      message: `LIBFABRIC still lacks ${OTHER}`,
    });
    expect(lines).toEqual([]);
    expect(await readdir(cache())).toEqual([]);
  });

  test("without the plugin: the error names the folder that was searched", async () => {
    await expect(installs()).rejects.toMatchObject({
      code: "KV_INSTALL_FAILED",
      message: expect.stringContaining(join(folder, "plugins")),
    });
  });

  test("the stub without a compiler: the error names those that were tried, and what to install", async () => {
    const noCompiler = { ...environment, PATH: folder };
    await expect(compileLibcudaStub(folder, folder, noCompiler)).rejects.toMatchObject({
      code: "KV_INSTALL_FAILED",
      message: expect.stringContaining("tried cc, gcc, clang"),
      hint: expect.stringContaining("apt-get install gcc"),
    });
  });

  test("the stub with a compiler that fails: the error has the compiler's last line", async () => {
    const CC = join(folder, "my-cc");
    await writeFile(CC, "#!/bin/sh\necho no room >&2; exit 1\n");
    await chmod(CC, 0o755);
    await expect(compileLibcudaStub(folder, folder, { ...environment, CC })).rejects.toMatchObject({
      code: "KV_INSTALL_FAILED",
      message: `${CC} could not compile a stub of libcuda.so.1: no room`,
    });
  });

  test("the newest dependency folder is used, and only for its own backend", async () => {
    for (const version of ["2.4", "2.10", "2.9"])
      await mkdir(join(cache(), `libfabric-${version}-x86_64`), { recursive: true });
    expect(await dependencyFolder("LIBFABRIC", environment)).toBe(
      join(cache(), "libfabric-2.10-x86_64"),
    );
    expect(await dependencyFolder("UCX", environment)).toBeUndefined();
    expect(await dependencyFolder("constructor", environment)).toBeUndefined();
  });

  test("FI_PROVIDER_PATH is set only for a libfabric that was installed here", () => {
    expect(variablesFor("/installed", ["libcuda.so.1", "libfabric.so.1"])).toEqual([
      ["FI_PROVIDER_PATH", "/installed"],
    ]);
    expect(variablesFor("/installed", ["libcuda.so.1"])).toEqual([]);
  });
});
