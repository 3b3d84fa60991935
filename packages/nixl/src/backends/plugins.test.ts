import { mkdir, symlink, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, expect, test } from "vitest";
import { pluginFolder, remedyFor } from "./plugins.js";

const folder = scratchFolder();
const at = (...path: string[]) => join(folder, ...path);
beforeAll(async () => {
  const library = at("kv-nixl", "nixl-cu12-1.5.0-x86_64", ".libs");
  await mkdir(library, { recursive: true });
  await writeFile(join(library, "libnixl_capi.so"), "");
  await mkdir(at("link"));
  await symlink(join(library, "libnixl_capi.so"), at("link", "libnixl_capi.so"));
});

test("plugins lie beside the real file of a linked library, unless NIXL_PLUGIN_DIR names a folder", async () => {
  const link = at("link", "libnixl_capi.so");
  expect(pluginFolder(link, {})).toBe(at("kv-nixl", "nixl-cu12-1.5.0-x86_64", ".libs", "plugins"));
  expect(pluginFolder(link, { NIXL_PLUGIN_DIR: "/named" })).toBe("/named");
  expect(pluginFolder("/nowhere/libnixl_capi.so", {})).toBe("/nowhere/plugins");
});

test("missing libraries of the wheel: reinstall NIXL; others: install the system's packages", () => {
  const remedy = (...names: string[]) =>
    remedyFor(
      "UCX",
      names.map((name) => ({ kind: "library", name })),
      { hasDependencies: true, reinstall: "again" },
    );
  expect(remedy("libucp-b39b3ed9.so.0.0.0", "libcuda.so.1")).toBe("again");
  expect(remedy("libnixl_common.so")).toBe("again");
  expect(remedy("libcuda.so.1", "libcudart.so.12")).toContain("install CUDA's driver and runtime");
  expect(remedy("libdoca_common.so.2")).toContain("install the system's packages");
});

test("what NIXL's core needs of the system: OpenSSL 3 and glibc are named with where to get them", () => {
  const options = { hasDependencies: true, reinstall: "again" };
  const openSsl = remedyFor("NIXL", [{ kind: "library", name: "libssl.so.3" }], options);
  expect(openSsl).toContain("apt-get install libssl3");
  expect(openSsl).toContain("Debian 11 has none");
  const glibc = remedyFor(
    "NIXL",
    [{ kind: "version", name: "GLIBC_2.28", library: "libc.so.6" }],
    options,
  );
  expect(glibc).toContain("a system with glibc 2.28 or newer");
});
