// Builds the addon, the stand-in for NIXL that tests load, and the libraries of one unit. It uses the system's C++ compiler and the
// headers of two npm packages: no gyp, no download. It does nothing when neither a source nor a flag has changed.
// `node native/build.mjs [--force] [--only-addon] [--sanitize]`; the build with sanitizers goes into a folder of its own.
import { spawnSync } from "node:child_process";
import { existsSync, mkdirSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { compile, digestOf, FLAGS, LINK, nativeRoot, OPTIMISED, run, sourcesIn } from "./scripts/compile.mjs";
import { removeOutdatedAddons } from "./scripts/platform-packages.mjs";
import { buildSingleUnitLibraries } from "./scripts/single-unit-libraries.mjs";

const force = process.argv.includes("--force");
const sanitize = process.argv.includes("--sanitize")
  ? ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
  : [];
const build = sanitize.length > 0 ? join(nativeRoot, "build", "sanitize") : join(nativeRoot, "build");
const addon = join(build, "kv_nixl.node");
const fake = join(build, "libfake_nixl_capi.so");
const isAddonAlone = process.argv.includes("--only-addon");

const flags = [
  ...FLAGS,
  "-Wno-restrict",
  // Line numbers for the stacks of findings; no optimisation, which takes long to compile.
  ...(sanitize.length > 0 ? ["-O0", "-g1", "-fno-omit-frame-pointer", ...sanitize] : OPTIMISED),
];
// The sanitizers intercept exceptions in the shared C++ runtime, so it must not be linked statically.
const link = [...LINK, ...(sanitize.length > 0 ? sanitize : ["-static-libstdc++", "-static-libgcc"])];

function findCompiler() {
  const candidates = process.env.CXX ? [process.env.CXX] : ["g++", "clang++", "c++"];
  return candidates.find((name) => spawnSync(name, ["--version"], { stdio: "ignore" }).status === 0);
}

/** Builds a library unless neither its sources nor the flags have changed. */
async function buildLibrary(compiler, { library, sources, link: linkWith }) {
  const stamp = `${library}.digest`;
  const digest = digestOf([compiler, flags, linkWith, process.arch], sourcesIn(sources));
  if (!force && existsSync(library) && existsSync(stamp) && readFileSync(stamp, "utf8") === digest) return;
  // Two builds may run at once, so each has a work folder. Results are renamed into place, since a process may have them loaded.
  const work = join(build, `work-${process.pid}`);
  mkdirSync(work, { recursive: true });
  try {
    const objects = await compile([compiler], flags, { sources, work });
    await run([compiler, ...objects, ...linkWith, "-o", join(work, "library")]);
    renameSync(join(work, "library"), library);
    writeFileSync(stamp, digest);
    process.stderr.write(`kv_nixl: built ${library}\n`);
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
  await buildLibrary(compiler, { library: addon, sources: "src", link });
  if (!isAddonAlone) {
    await buildLibrary(compiler, { library: fake, sources: "fake/nixl", link });
    buildSingleUnitLibraries(compiler, { force });
  }
} catch (error) {
  console.error(`native: ${error.message}`);
  process.exit(1);
}
