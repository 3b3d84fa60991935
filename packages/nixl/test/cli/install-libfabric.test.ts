import { copyFile, mkdir, readdir, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, beforeEach, describe, expect, onTestFinished, test, vi } from "vitest";
import { dependencyFolder, PreloadFinder, variablesFor } from "../../src/backends/plugins.js";
import { compileLibcudaStub, installLibfabric } from "../../src/install/install-libfabric.js";
import { libraryPackage } from "../../src/library/library-package.js";
import { missingParts } from "../../src/library/missing-parts.js";
import { compile } from "../support/compile.js";
import { refused } from "../support/refused.js";

// The repository may have built the package of libraries, which these tests do not depend on.
vi.mock("../../src/library/library-package.js");

// A plugin that needs CUDA's driver as NIXL's plugin does, and a fake driver library.
const DRIVER = "libcuda.so.1";
const OTHER = "libkv_other.so.1";
const CALLED = ["cuInit", "cuCtxSetCurrent", "cuDeviceGetPCIBusId", "cuPointerGetAttributes"];
const FOLDER = "libfabric-2.5-x86_64";

const works = process.platform === "linux" && process.arch === "x64";
const made = scratchFolder();
let driverOfThisMachine = false;

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
    await compile(made, DRIVER, { has: CALLED });
    await compile(made, OTHER, { has: ["kv_other"] });
    const plugin = await compile(made, "plugin.so", { calls: CALLED, needs: [DRIVER] });
    const both = { calls: [...CALLED, "kv_other"], needs: [DRIVER, OTHER] };
    await compile(made, "plugin-of-both.so", both);
    driverOfThisMachine = (await missingParts(plugin)).length === 0;
  });

  beforeEach(async () => {
    folder = scratchFolder(onTestFinished);
    await mkdir(join(folder, "plugins"));
    environment = {
      PATH: process.env["PATH"] ?? "",
      XDG_CACHE_HOME: join(folder, "cache"),
      NIXL_PLUGIN_DIR: join(folder, "plugins"),
    };
    lines = [];
    vi.mocked(libraryPackage).mockReturnValue({ name: "", path: undefined, folder: undefined });
  });

  test("without a driver, compiles a stub of its library, which is loaded before the plugin, and does not shadow a driver that is installed later", async (context) => {
    context.skip(driverOfThisMachine, "this machine has a driver");
    await hasPlugin("plugin.so");
    const nothing = { libraries: [], variables: [] };
    expect(await preloads()).toEqual(nothing);
    await installs();
    expect(lines.join("\n")).toContain("no NVIDIA driver: compiling a stub that reports no device");
    expect(await installedFiles()).toEqual([DRIVER]);
    expect(await preloads()).toEqual({ libraries: [installed(DRIVER)], variables: [] });
    await getsDriver();
    expect(await installedFiles()).toEqual([DRIVER]);
    expect(await preloads()).toEqual(nothing);
  });

  test("with a driver: nothing is compiled", async () => {
    await hasPlugin("plugin.so");
    await getsDriver();
    await installs();
    expect(lines).toEqual(["LIBFABRIC loads: nothing to do (with the system's libraries)"]);
    expect(await installedFiles()).toEqual([]);
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
    const { message } = await refused(installs, "KV_INSTALL_FAILED");
    expect(message).toBe(`LIBFABRIC still lacks ${OTHER}`);
    expect(lines).toEqual([]);
    expect(await readdir(cache())).toEqual([]);
  });

  test("without the plugin: the error names the folder that was searched", async () => {
    const { message } = await refused(installs, "KV_INSTALL_FAILED");
    expect(message).toContain(join(folder, "plugins"));
  });

  const stub = (env: Record<string, string>) =>
    refused(compileLibcudaStub(folder, folder, { ...environment, ...env }), "KV_INSTALL_FAILED");

  test("the stub without a compiler: the error names those that were tried, and what to install", async () => {
    const { message, hint } = await stub({ PATH: folder });
    expect(message).toContain("tried cc, gcc, clang");
    expect(hint).toContain("apt-get install gcc");
  });

  test("the stub with a compiler that fails: the error has the compiler's last line", async () => {
    const CC = join(folder, "my-cc");
    await writeFile(CC, "#!/bin/sh\necho no room >&2; exit 1\n", { mode: 0o755 });
    const { message } = await stub({ CC });
    expect(message).toBe(`${CC} could not compile a stub of libcuda.so.1: no room`);
  });

  test("a dependency folder is used only for its own backend", async () => {
    await mkdir(join(cache(), FOLDER), { recursive: true });
    const found = ["LIBFABRIC", "UCX", "constructor"].map((name) =>
      dependencyFolder(name, environment),
    );
    expect(await Promise.all(found)).toEqual([join(cache(), FOLDER), undefined, undefined]);
  });

  test("FI_PROVIDER_PATH is set only for a libfabric that was installed here", () => {
    expect(variablesFor("/installed", ["libcuda.so.1", "libfabric.so.1"])).toEqual([
      ["FI_PROVIDER_PATH", "/installed"],
    ]);
    expect(variablesFor("/installed", ["libcuda.so.1"])).toEqual([]);
  });
});
