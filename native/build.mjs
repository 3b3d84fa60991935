// Builds the addon, and what only tests load: the stand-in for NIXL and the libraries of one unit.
// It uses the system's C++ compiler and the headers of two npm packages: no gyp, no download. turbo
// runs it (compile, compile:stand-ins, compile:sanitized), and not again while its inputs are the
// same. `node native/build.mjs [--addon | --stand-ins] [--sanitize]`; what is built with sanitizers
// goes into a folder of its own.
import { spawnSync } from "node:child_process";
import { mkdirSync, renameSync, rmSync } from "node:fs";
import { join } from "node:path";
import { compile, FLAGS, LINK, nativeRoot, OPTIMISED, run } from "./scripts/compile.mjs";
import { removeOutdatedAddons } from "./scripts/platform-packages.mjs";
import { buildSingleUnitLibraries } from "./scripts/single-unit-libraries.mjs";

const isSanitized = process.argv.includes("--sanitize");
const sanitizers = isSanitized
  ? ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
  : [];
const build = isSanitized ? join(nativeRoot, "build", "sanitize") : join(nativeRoot, "build");

const flags = [
  ...FLAGS,
  "-Wno-restrict",
  // Line numbers for the stacks of findings; no optimisation, which takes long to compile.
  ...(isSanitized ? ["-O0", "-g1", "-fno-omit-frame-pointer", ...sanitizers] : OPTIMISED),
];
// The sanitizers intercept exceptions in the shared C++ runtime, so it must not be linked
// statically.
const link = [...LINK, ...(isSanitized ? sanitizers : ["-static-libstdc++", "-static-libgcc"])];

function findCompiler() {
  const candidates = process.env.CXX ? [process.env.CXX] : ["g++", "clang++", "c++"];
  return candidates.find(
    (name) => spawnSync(name, ["--version"], { stdio: "ignore" }).status === 0,
  );
}

/** Builds a library of the sources in a folder of `native/`. */
async function buildLibrary(compiler, name, sources) {
  // Two builds may run at once, so each has a work folder. Results are renamed into place, since a
  // process may have them loaded.
  const work = join(build, `work-${process.pid}`);
  mkdirSync(work, { recursive: true });
  try {
    const objects = await compile([compiler], flags, { sources, work });
    await run([compiler, ...objects, ...link, "-o", join(work, "library")]);
    renameSync(join(work, "library"), join(build, name));
    process.stderr.write(`kv_nixl: built ${join(build, name)}\n`);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}

if (process.platform !== "linux") {
  console.error(
    `kv_nixl: the addon is built on Linux only (this is ${process.platform}); @kv/transport-memory works here`,
  );
  process.exit(0);
}
const compiler = findCompiler();
if (compiler === undefined) {
  console.error(
    "kv_nixl: no C++ compiler found (tried $CXX, else g++, clang++, c++); install one, for example: apt-get install g++",
  );
  process.exit(1);
}
// @kv/nixl prefers a platform package's addon over the one that is built here.
removeOutdatedAddons();
try {
  if (!process.argv.includes("--stand-ins")) await buildLibrary(compiler, "kv_nixl.node", "src");
  if (!process.argv.includes("--addon")) {
    await buildLibrary(compiler, "libfake_nixl_capi.so", "fake/nixl");
    if (!isSanitized) buildSingleUnitLibraries(compiler);
  }
} catch (error) {
  console.error(`native: ${error.message}`);
  process.exit(1);
}
