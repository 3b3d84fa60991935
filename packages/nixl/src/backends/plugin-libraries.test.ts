import { copyFile, mkdir, rm } from "node:fs/promises";
import { dirname, join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, beforeEach, describe, expect, test, vi } from "vitest";
import { compile } from "../../test/support/compile.js";
import { libraryPackage } from "../library/library-package.js";
import { PreloadFinder } from "./plugins.js";

vi.mock("../library/library-package.js");
const LIBRARY = "libkv_dependency.so.1";
const DRIVER = "libkv_driver.so.1";
const FABRIC = "libfabric.so.1";
const works = process.platform === "linux";
const nothing = { libraries: [], variables: [] };
const folder = scratchFolder();
let cases = 0;

beforeAll(async () => {
  if (!works) return;
  for (const name of [LIBRARY, DRIVER, FABRIC])
    await compile(folder, name, { has: [symbolOf(name)] });
  for (const names of [[LIBRARY], [LIBRARY, DRIVER], [FABRIC]])
    await compile(folder, pluginOf(names), { calls: names.map(symbolOf), needs: names });
});

const symbolOf = (name: string) => `of_${name.replaceAll(".", "_")}`;
const pluginOf = (names: readonly string[]) => `plugin-${names.join("-")}`;

describe.runIf(works)("the libraries that a plugin needs before NIXL loads it", () => {
  let base = "";
  let environment: Record<string, string> = {};
  let finder = new PreloadFinder();
  const packaged = (name: string) => join(base, "package", "libfabric-2.5-x86_64", name);
  const find = (env = environment, backend = "LIBFABRIC") =>
    finder.find(backend, "/nowhere/libnixl_capi.so", env);

  /** NIXL has the plugin, which needs these libraries. */
  const hasPlugin = (names: readonly string[], backend = "LIBFABRIC") =>
    copyFile(join(folder, pluginOf(names)), join(base, "plugins", `libplugin_${backend}.so`));

  /** The optional package is installed, and has these libraries. */
  async function install(names: readonly string[]) {
    await mkdir(packaged(""), { recursive: true });
    for (const name of names) await copyFile(join(folder, name), packaged(name));
    vi.mocked(libraryPackage).mockReturnValue({
      name: "",
      path: "/nowhere",
      folder: join(base, "package"),
    });
  }

  beforeEach(async () => {
    base = join(folder, `case-${cases++}`);
    await mkdir(join(base, "plugins"), { recursive: true });
    environment = { PATH: process.env["PATH"] ?? "", NIXL_PLUGIN_DIR: join(base, "plugins") };
    finder = new PreloadFinder();
    vi.mocked(libraryPackage).mockReturnValue({ name: "", path: undefined, folder: undefined });
    await hasPlugin([LIBRARY]);
  });

  test("are those of the optional package, once it is installed, for its own backend alone", async () => {
    await hasPlugin([LIBRARY], "UCX");
    expect(await find()).toEqual(nothing);
    await install([LIBRARY]);
    expect(await find()).toEqual({ libraries: [packaged(LIBRARY)], variables: [] });
    expect(await find(environment, "UCX")).toEqual(nothing);
  });

  test("do not shadow a driver of the system", async () => {
    await hasPlugin([LIBRARY, DRIVER]);
    await install([LIBRARY, DRIVER]);
    const both = [packaged(LIBRARY), packaged(DRIVER)].sort();
    expect(await find()).toEqual({ libraries: both, variables: [] });
    await mkdir(join(base, "driver"));
    await copyFile(join(folder, DRIVER), join(base, "driver", DRIVER));
    finder.forget();
    expect(await find({ ...environment, LD_LIBRARY_PATH: join(base, "driver") })).toEqual({
      libraries: [packaged(LIBRARY)],
      variables: [],
    });
  });

  test("set FI_PROVIDER_PATH for the package's libfabric", async () => {
    await hasPlugin([FABRIC]);
    await install([FABRIC]);
    const variables = [["FI_PROVIDER_PATH", dirname(packaged(FABRIC))]];
    expect(await find()).toEqual({ libraries: [packaged(FABRIC)], variables });
  });

  test("are cached until an agent fails to start with them", async () => {
    await install([LIBRARY]);
    const installed = { libraries: [packaged(LIBRARY)], variables: [] };
    expect(await find()).toEqual(installed);
    await rm(packaged(LIBRARY));
    expect(await find()).toEqual(installed);
    finder.forget();
    expect(await find()).toEqual(nothing);
  });

  test("are looked for again after a search that failed", async () => {
    await install([LIBRARY]);
    // No process can be started with such a variable.
    await expect(find({ ...environment, KV_BROKEN: "a\0b" })).rejects.toThrow();
    expect(await find()).toEqual({ libraries: [packaged(LIBRARY)], variables: [] });
  });
});
