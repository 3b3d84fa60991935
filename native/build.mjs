// Compiles the addon with the compiler at hand, against the headers of two npm packages: no gyp, no download. Also the
// stand-in for NIXL that tests load. Does nothing when neither a source nor a flag has changed.
// `node build.mjs [--force] [--sanitize]`; with sanitizers it goes into a folder of its own.
import { spawnSync } from "node:child_process";
import { existsSync, mkdirSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { buildCudaTests } from "./build-cuda-tests.mjs";
import { buildNeuron } from "./build-neuron.mjs";
import { compile, digestOf, FLAGS, here, LINK, OPTIMISED, run, sourcesIn } from "./compile.mjs";
import { dropOutdated } from "./platform-packages.mjs";

const sanitize = process.argv.includes("--sanitize")
  ? ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
  : [];
const build = sanitize.length > 0 ? join(here, "build", "sanitize") : join(here, "build");
const addon = join(build, "kv_nixl.node");
const fake = join(build, "libfake_nixl_capi.so");
const stamp = join(build, "digest");

const flags = [
  ...FLAGS,
  "-Wno-restrict",
  // Lines for the stacks of findings, and nothing else that takes time to compile.
  ...(sanitize.length > 0 ? ["-O0", "-g1", "-fno-omit-frame-pointer", ...sanitize] : OPTIMISED),
];
// The sanitizers' own library intercepts exceptions, and must find the same runtime.
const link = [...LINK, ...(sanitize.length > 0 ? sanitize : ["-static-libstdc++", "-static-libgcc"])];

function compilerAtHand() {
  const candidates = process.env.CXX ? [process.env.CXX] : ["g++", "clang++", "c++"];
  return candidates.find((name) => spawnSync(name, ["--version"], { stdio: "ignore" }).status === 0);
}

async function buildAll(compiler, digest) {
  // A folder of its own, since two builds may run at once; results are renamed into place, since they may be in use.
  const work = join(build, `work-${process.pid}`);
  mkdirSync(work, { recursive: true });
  try {
    const objects = await compile([compiler], flags, work);
    await run([compiler, ...objects, ...link, "-o", join(work, "addon")]);
    const standIn = fakeSources.filter((file) => file.endsWith(".cc"));
    await run([compiler, ...flags, ...standIn, ...link, "-o", join(work, "fake")]);
    renameSync(join(work, "addon"), addon);
    renameSync(join(work, "fake"), fake);
    writeFileSync(stamp, digest);
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
const compiler = compilerAtHand();
if (compiler === undefined) {
  console.error(
    "kv_nixl: no C++ compiler found (tried $CXX, else g++, clang++, c++); install one, for example: apt-get install g++",
  );
  process.exit(1);
}
// The loader would take them before what is built here.
dropOutdated();
const fakeSources = sourcesIn("fake/nixl");
const digest = digestOf([compiler, flags, link, process.arch], [...sourcesIn("src"), ...fakeSources]);
const built = [addon, fake, stamp].every((file) => existsSync(file));
const fresh = built && readFileSync(stamp, "utf8") === digest && !process.argv.includes("--force");
if (!fresh) {
  try {
    await buildAll(compiler, digest);
  } catch (error) {
    console.error(`kv_nixl: ${error.message}`);
    process.exit(1);
  }
  process.stderr.write(`kv_nixl: built ${addon}\n`);
}
const force = process.argv.includes("--force");
for (const [name, buildOthers] of [
  ["kv_neuron", buildNeuron],
  ["kv_cuda_memory", buildCudaTests],
]) {
  try {
    buildOthers(compiler, { force });
  } catch (error) {
    console.error(`${name}: ${error.message}`);
    process.exit(1);
  }
}
