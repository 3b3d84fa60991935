import { copyFile, mkdir, rm } from "node:fs/promises";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, beforeEach, describe, expect, test, vi } from "vitest";
import { compile } from "../../test/support/compile.js";
import { libraryPackage } from "../library/library-package.js";
import { PreloadFinder } from "./plugins.js";

vi.mock("../library/library-package.js");
const LIBRARY = "libkv_dependency.so.1";
const works = process.platform === "linux";
const nothing = { libraries: [], variables: [] };
const folder = scratchFolder();
let cases = 0;

beforeAll(async () => {
  if (!works) return;
  await compile(folder, LIBRARY, { has: ["kv_dependency"] });
  await compile(folder, "plugin.so", { calls: ["kv_dependency"], needs: [LIBRARY] });
});

describe.runIf(works)("the libraries that a plugin needs before NIXL loads it", () => {
  let environment: Record<string, string> = {};
  let finder = new PreloadFinder();
  const cached = (name: string) => join(environment["XDG_CACHE_HOME"] ?? "", "kv-nixl", name);
  const find = (env = environment) => finder.find("LIBFABRIC", "/nowhere/libnixl_capi.so", env);

  /** As `kv-nixl install --with libfabric` leaves it. */
  async function install(name: string) {
    await mkdir(cached(name), { recursive: true });
    await copyFile(join(folder, LIBRARY), join(cached(name), LIBRARY));
    return { libraries: [join(cached(name), LIBRARY)], variables: [] };
  }

  beforeEach(async () => {
    const base = join(folder, `case-${cases++}`);
    await mkdir(join(base, "plugins"), { recursive: true });
    await copyFile(join(folder, "plugin.so"), join(base, "plugins", "libplugin_LIBFABRIC.so"));
    environment = {
      PATH: process.env["PATH"] ?? "",
      XDG_CACHE_HOME: base,
      NIXL_PLUGIN_DIR: join(base, "plugins"),
    };
    finder = new PreloadFinder();
    vi.mocked(libraryPackage).mockReturnValue({ name: "", path: undefined, folder: undefined });
  });

  test("are those of the optional package, unless kv-nixl install has installed others", async () => {
    const packaged = join(environment["XDG_CACHE_HOME"] ?? "", "package");
    await mkdir(join(packaged, "libfabric-9.9-x86_64"), { recursive: true });
    await copyFile(join(folder, LIBRARY), join(packaged, "libfabric-9.9-x86_64", LIBRARY));
    vi.mocked(libraryPackage).mockReturnValue({ name: "", path: "/nowhere", folder: packaged });
    expect(await find()).toEqual({
      libraries: [join(packaged, "libfabric-9.9-x86_64", LIBRARY)],
      variables: [],
    });
    const installed = await install("libfabric-2.5-x86_64");
    expect(await find()).toEqual(installed);
  });

  test("are found once they are installed, and are those of the newest installation, also when it replaced an older one meanwhile", async () => {
    expect(await find()).toEqual(nothing);
    const old = await install("libfabric-2.5-x86_64");
    expect(await find()).toEqual(old);
    const newer = await install("libfabric-2.10-x86_64");
    await rm(cached("libfabric-2.5-x86_64"), { recursive: true });
    expect(await find()).toEqual(newer);
  });

  test("are cached until an agent fails to start with them", async () => {
    const installed = await install("libfabric-2.5-x86_64");
    expect(await find()).toEqual(installed);
    await rm(join(cached("libfabric-2.5-x86_64"), LIBRARY));
    expect(await find()).toEqual(installed);
    finder.forget();
    expect(await find()).toEqual(nothing);
  });

  test("are looked for again after a search that failed", async () => {
    const installed = await install("libfabric-2.5-x86_64");
    // No process can be started with such a variable.
    await expect(find({ ...environment, KV_BROKEN: "a\0b" })).rejects.toThrow();
    expect(await find()).toEqual(installed);
  });
});
