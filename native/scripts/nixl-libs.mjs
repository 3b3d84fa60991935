// Which files of NIXL's wheel go into the package of libraries, what they may need of the system, and whether each has an attribution.
import { existsSync, readdirSync, readFileSync, statSync } from "node:fs";
import { basename, join, relative } from "node:path";
import { digestOf, nativeRoot } from "./compile.mjs";
import { isNewer, neededLibraries } from "./elf-needs.mjs";
import { GLIBC } from "./platform-packages.mjs";

/** The package's folder, and the folder in it that has the layout of an installation by `kv-nixl install`. */
export const LIBS_PACKAGE = join(nativeRoot, "npm", "libs-linux-x64-gnu");
export const INSTALLATION = "nixl-cu12-1.5.0-x86_64";
export const LIBS_FOLDER = join(LIBS_PACKAGE, "dist", INSTALLATION);
export const libsStamp = join(nativeRoot, "build", "libs-linux-x64-gnu.digest");

/** The largest tarball and the largest sum of file lengths, in bytes. */
export const LIMITS = { packed: 13e6, unpacked: 67e6 };

const NIXL = ".nixl_cu12.mesonpy.libs";
const BUNDLED = "nixl_cu12.libs";
const UCX_FOLDER = join(BUNDLED, "ucx");
/** What a program or NIXL opens by name. All else is what these need. */
const PLUGINS = ["UCX", "POSIX", "LIBFABRIC"];
const UCX_MODULES = /^lib(uct_(cma|cuda|ib|ib_efa|ib_mlx5)|ucm_cuda)\.so/;

// Every system that runs Node has these; libssl and libcrypto are OpenSSL 3.
const OF_THE_SYSTEM =
  /^(lib(c|m|dl|pthread|rt|stdc\+\+|gcc_s|z)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+|lib(ssl|crypto)\.so\.3)$/;
// Libraries of drivers and fabrics. Only the files that are named need them, and NIXL and UCX work without those files.
const OF_DRIVERS = {
  "libplugin_LIBFABRIC.so": ["libcuda.so.1", "libcudart.so.12", "libfabric.so.1", "libhwloc.so.15"],
  "libuct_cuda.so.0.0.0": ["libcuda.so.1", "libnvidia-ml.so.1"],
  "libucm_cuda.so.0.0.0": ["libcuda.so.1", "libcudart.so.12"],
  "libuct_ib_efa.so.0.0.0": ["libefa.so.1"],
};

/**
 * The files of an unpacked wheel that are packed, by paths below `folder`. Throws when one needs a library or a glibc that the system need
 * not have.
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
      // The RPATHs of the wheel lead to these folders.
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

/** The patterns of file names in the table of ATTRIBUTIONS.md. */
function attributed() {
  const text = readFileSync(join(LIBS_PACKAGE, "ATTRIBUTIONS.md"), "utf8");
  const rows = text.split("\n").filter((line) => line.startsWith("| "));
  const cells = rows
    .map((row) => row.split(" | ")[2] ?? "")
    .filter((cell) => !cell.startsWith("compiled into"));
  const globs = cells.flatMap((cell) => Array.from(cell.matchAll(/`([^`]+)`/g), ([, glob]) => glob));
  return globs.map((glob) => new RegExp(`^${glob.replaceAll(".", "\\.").replaceAll("*", ".*")}$`));
}

/** The files that no row of ATTRIBUTIONS.md names. */
export function withoutAttribution(paths) {
  const patterns = attributed();
  return paths.filter((path) => !patterns.some((pattern) => pattern.test(basename(path))));
}

/** Every file below a folder, by its path in it. */
export function filesBelow(folder) {
  return readdirSync(folder, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(folder, join(entry.parentPath ?? entry.path, entry.name)))
    .sort();
}

/** The sum of the lengths of all files below a folder, in bytes. */
export const bytesBelow = (folder) =>
  filesBelow(folder).reduce((sum, path) => sum + statSync(join(folder, path)).size, 0);

/** A digest of everything that decides the package's files. */
export const libsDigest = () =>
  digestOf(
    [INSTALLATION],
    ["build-libs.mjs", "nixl-libs.mjs"].map((name) => join(nativeRoot, "scripts", name)),
  );

/** Whether the libraries were built from the present scripts. */
export const libsAreCurrent = () =>
  existsSync(LIBS_FOLDER) && existsSync(libsStamp) && readFileSync(libsStamp, "utf8") === libsDigest();
