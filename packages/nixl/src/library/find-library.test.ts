import { chmod, mkdir, rm, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeEach, expect, onTestFinished, test, vi } from "vitest";
import { refused } from "../../test/support/refused.js";
import { remedyFor } from "../backends/plugins.js";
import type { Environment } from "../environment.js";
import { installNixl, useNixl } from "../install/install.js";
import { cacheFolder } from "./cache-folder.js";
import { findLibrary, locateLibrary } from "./find-library.js";
import { libraryPackage } from "./library-package.js";

// The repository may have built the package of libraries, which these tests do not depend on.
vi.mock("./library-package.js");
const PACKAGE = "@kv/nixl-libs-linux-x64-gnu";

const hasPackage = (path: string | undefined) =>
  vi.mocked(libraryPackage).mockReturnValue({ name: PACKAGE, path, folder: path && dirname(path) });

let folder = "";
beforeEach(() => {
  folder = scratchFolder(onTestFinished);
  hasPackage(undefined);
});

/** An environment with nothing in it: no python3 on PATH, an empty home. */
const bare = (more: Record<string, string> = {}) => ({
  HOME: folder,
  PATH: join(folder, "bin"),
  ...more,
});

async function library(...path: string[]): Promise<string> {
  const at = join(folder, ...path);
  await mkdir(at, { recursive: true });
  await writeFile(join(at, "libnixl_capi.so"), "");
  return join(at, "libnixl_capi.so");
}

const WHEEL = ".nixl_cu12.mesonpy.libs";

test("searches the option, KV_NIXL_LIBRARY, NIXL_PREFIX, the cache, the optional package and a virtual environment, in this order", async () => {
  const option = await library("option");
  const variable = await library("variable");
  const prefix = await library("prefix", "lib64");
  const cache = await library(".cache", "kv-nixl", "nixl-cu12-1.5.0-x86_64", WHEEL);
  const packaged = await library("node_modules", PACKAGE);
  hasPackage(packaged);
  const venv = await library("venv", "lib", "python3.12", "site-packages", WHEEL);
  const environment: Record<string, string> = bare({
    KV_NIXL_LIBRARY: variable,
    NIXL_PREFIX: join(folder, "prefix"),
    VIRTUAL_ENV: join(folder, "venv"),
  });
  expect(await findLibrary({ library: option, environment })).toBe(option);
  expect(await findLibrary({ environment })).toBe(variable);
  delete environment.KV_NIXL_LIBRARY;
  expect(await findLibrary({ environment })).toBe(prefix);
  delete environment.NIXL_PREFIX;
  expect(await findLibrary({ environment })).toBe(cache);
  await rm(join(folder, ".cache"), { recursive: true });
  expect(await locateLibrary({ environment })).toEqual({ path: packaged, source: PACKAGE });
  hasPackage(undefined);
  expect(await findLibrary({ environment })).toBe(venv);
});

test("finds the newest of several other versions, and ignores unfinished installations", async () => {
  await library("xdg", "kv-nixl", "nixl-cu12-1.5.1-x86_64", WHEEL);
  const newer = await library("xdg", "kv-nixl", "nixl-cu12-1.10.0-x86_64", WHEEL);
  await library("xdg", "kv-nixl", ".installing-1-x", WHEEL);
  const environment = bare({ XDG_CACHE_HOME: join(folder, "xdg") });
  expect(cacheFolder(environment)).toBe(join(folder, "xdg", "kv-nixl"));
  expect(await findLibrary({ environment })).toBe(newer);
});

test("python3's site-packages are searched", async () => {
  const found = await library("site", "nixl_cu13.libs");
  const python = join(folder, "bin", "python3");
  await mkdir(join(folder, "bin"));
  await writeFile(python, `#!/bin/sh\necho '["${join(folder, "site")}"]'\n`);
  await chmod(python, 0o755);
  expect(await findLibrary({ environment: bare() })).toBe(found);
});

const notFound = (environment: Environment) =>
  refused(findLibrary({ environment }), "KV_LIBRARY_NOT_FOUND");

test.each([{ KV_NIXL_LIBRARY: "/nowhere/lib.so" }, { NIXL_PREFIX: "/nowhere" }])(
  "a place that is named explicitly and has no library is an error that names it: %j",
  async (named) => {
    await library(".cache", "kv-nixl", "nixl-cu12-1.5.0-x86_64", WHEEL);
    expect((await notFound({ ...bare(), ...named })).message).toContain("/nowhere");
  },
);

test("not found: one error with every place that was tried, the reason, and the command that helps", async () => {
  const environment = bare({ VIRTUAL_ENV: join(folder, "gone"), LD_LIBRARY_PATH: "/lib-a:/lib-b" });
  const { message, hint } = await notFound(environment);
  expect(hint).toBe("run: npx --no-install kv-nixl install");
  for (const place of [
    join(folder, ".cache", "kv-nixl"),
    join(folder, "gone"),
    `${PACKAGE} (optional package): not installed`,
    "python3's site-packages",
    "/lib-a",
    "/lib-b",
    "(the loader): no such file",
  ])
    expect(message).toContain(place);
});

test("F3: what was installed or chosen last is used, and the pinned version by default; the hint of a NIXL that does not work mends", async () => {
  const environment = bare();
  const of = (name: string) =>
    library(".cache", "kv-nixl", `nixl-${name}-x86_64`, `.nixl_${name.slice(0, 4)}.mesonpy.libs`);
  // Each of them is used once it is installed.
  const newer = await of("cu12-1.5.1");
  expect(await findLibrary({ environment })).toBe(newer);
  for (const name of ["cu13-1.5.0", "cu12-1.5.0"]) {
    const preferred = await of(name);
    expect(await findLibrary({ environment })).toBe(preferred);
  }
  await useNixl("1.5.1", 12, environment);
  expect(await findLibrary({ environment })).toBe(newer);
  // Of 1.5.1 LIBFABRIC wants a libfabric that is not there: the hint is `kv-nixl install`.
  const missing = [{ kind: "version", name: "FABRIC_1.10", library: "libfabric.so.1" }] as const;
  const remedy = remedyFor("LIBFABRIC", missing, { hasDependencies: true, reinstall: "" });
  expect(remedy).toContain("npx --no-install kv-nixl install");
  if (process.arch === "x64") {
    const pinned = await installNixl({ environment });
    expect(pinned).toMatchObject({ existed: true });
    expect(await findLibrary({ environment })).toBe(pinned.library);
    expect(pinned.library).toContain("cu12-1.5.0");
  }
  const { hint } = await refused(useNixl("1.4.1", 12, environment), "KV_INSTALL_FAILED");
  expect(hint).toBe("npx --no-install kv-nixl install --version 1.4.1 --cuda 12");
});
