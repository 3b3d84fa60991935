import { existsSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { describe, expect, test } from "vitest";
import {
  bytesBelow,
  chosenFiles,
  filesBelow,
  LIBS_FOLDER,
  LIBS_PACKAGE,
  LIMITS,
  libsAreCurrent,
  withoutAttribution,
} from "../../native/scripts/nixl-libs.mjs";
import { DEFAULT_VERSION, wheelFor } from "../../packages/nixl/src/install/wheels.js";
import { manifests, root } from "./tarballs.js";

// The package with NIXL's libraries. `npm run build:libs` makes its files; `npm run kv-nixl -- selftest` installs it for a user.
const NAME = "@kv/nixl-libs-linux-x64-gnu";

test("its library lies where kv-nixl install would put that version", () => {
  const { folder, folders } = wheelFor(DEFAULT_VERSION, 12, "x64");
  expect(manifests.get(NAME)?.exports).toMatchObject({
    "./libnixl_capi.so": `./dist/${folder}/${folders[0]}/libnixl_capi.so`,
  });
  expect(LIBS_FOLDER).toBe(join(LIBS_PACKAGE, "dist", folder));
});

test("its attributions name the pinned wheel, every licence of its manifest, and a pattern for each library", () => {
  const text = readFileSync(join(LIBS_PACKAGE, "ATTRIBUTIONS.md"), "utf8");
  expect(text).toContain(wheelFor(DEFAULT_VERSION, 12, "x64").sha256);
  const manifest = JSON.parse(readFileSync(join(LIBS_PACKAGE, "package.json"), "utf8")) as {
    license: string;
  };
  for (const licence of manifest.license.split(" AND ")) expect(text).toContain(licence);
  expect(
    withoutAttribution(["a/libnixl_capi.so", "b/libuct_ib.so.0.0.0", "b/libnl-3-47cd035c.so.200"]),
  ).toEqual([]);
  expect(withoutAttribution(["b/libcudart.so.12", "b/libcurl-6afc9505.so.4.8.0"])).toHaveLength(2);
});

describe.skipIf(!libsAreCurrent())("the libraries of npm run build:libs", () => {
  test("are those that NIXL's core, UCX, POSIX and LIBFABRIC need, all attributed, and no others", () => {
    const files = filesBelow(LIBS_FOLDER);
    expect(chosenFiles(LIBS_FOLDER)).toEqual(files);
    expect(withoutAttribution(files)).toEqual([]);
    for (const plugin of ["UCX", "POSIX", "LIBFABRIC"]) {
      expect(files.some((path) => path.endsWith(`/plugins/libplugin_${plugin}.so`))).toBe(true);
    }
  });

  test("include nothing that NVIDIA does not allow to redistribute", () => {
    const proprietary = /libuct_ib_mlx5_(ext|gda|gdp)|libcud|libcufile|libplugin_(GDS|GPUNETIO)|libdoca/;
    expect(filesBelow(LIBS_FOLDER).filter((path) => proprietary.test(path))).toEqual([]);
  });

  test("are within the limits, unpacked and as a tarball", () => {
    expect(bytesBelow(LIBS_PACKAGE)).toBeLessThan(LIMITS.unpacked);
    const tarball = join(
      root,
      "native/build/packages",
      `kv-nixl-libs-linux-x64-gnu-${manifests.get(NAME)?.version}.tgz`,
    );
    expect(existsSync(tarball)).toBe(true);
    expect(statSync(tarball).size).toBeLessThan(LIMITS.packed);
  });
});
