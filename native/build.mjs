// Compiles the addon with the compiler at hand, against the headers of two npm packages: no gyp, no download. Also the
// stand-in for NIXL that tests load. Does nothing when neither a source nor a flag has changed.
// `node build.mjs [--force] [--sanitize]`; with sanitizers it goes into a folder of its own, and into no package.
import { spawn, spawnSync } from "node:child_process";
import { createHash } from "node:crypto";
import {
  copyFileSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { createRequire } from "node:module";
import { availableParallelism } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { buildNeuron } from "./build-neuron.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const require = createRequire(import.meta.url);
const sanitize = process.argv.includes("--sanitize")
  ? ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
  : [];
const build = sanitize.length > 0 ? join(here, "build", "sanitize") : join(here, "build");
const addon = join(build, "kv_nixl.node");
const fake = join(build, "libfake_nixl_capi.so");
const packaged = join(here, "npm", "linux-x64", "kv_nixl.node");
const stamp = join(build, "digest");
const NAPI_VERSION = 8;

const headers = (name, ...inside) => join(dirname(require.resolve(`${name}/package.json`)), ...inside);
const FLAGS = [
  "-std=c++20",
  ...(sanitize.length > 0 ? ["-O1", "-g", "-fno-omit-frame-pointer", ...sanitize] : ["-O3"]),
  ..."-fPIC -fvisibility=hidden -Wall -Wextra -Wno-restrict -Wno-missing-field-initializers -pthread".split(
    " ",
  ),
  `-DNAPI_VERSION=${NAPI_VERSION}`,
  ..."-DNAPI_CPP_EXCEPTIONS -DNODE_ADDON_API_DISABLE_DEPRECATED -DBUILDING_NODE_EXTENSION".split(" "),
  // What is thrown while an environment ends has nowhere to go, and must not end the process.
  "-DNODE_API_SWALLOW_UNTHROWABLE_EXCEPTIONS",
  ...["-isystem", headers("node-api-headers", "include"), "-isystem", headers("node-addon-api")],
];
// nodelete: Node unloads an addon when the last worker that loaded it ends, and an agent's thread may outlive that.
const LINK = [
  ..."-shared -pthread -Wl,-z,nodelete -Wl,--as-needed -ldl".split(" "),
  // The sanitizers' own library intercepts exceptions, and must find the same runtime.
  ...(sanitize.length > 0 ? sanitize : ["-static-libstdc++", "-static-libgcc"]),
];

function compilerAtHand() {
  const candidates = process.env.CXX ? [process.env.CXX] : ["g++", "clang++", "c++"];
  return candidates.find((name) => spawnSync(name, ["--version"], { stdio: "ignore" }).status === 0);
}

function sourcesIn(folder) {
  return readdirSync(join(here, folder))
    .sort()
    .map((name) => join(here, folder, name));
}

function digestOf(compiler, files) {
  const hash = createHash("sha256").update(JSON.stringify([compiler, FLAGS, LINK, process.arch]));
  for (const file of files)
    hash.update(file.slice(here.length)).update("\0").update(readFileSync(file)).update("\0");
  return hash.digest("hex");
}

function run(compiler, args) {
  return new Promise((resolve, reject) => {
    const child = spawn(compiler, args, { stdio: ["ignore", "inherit", "inherit"] });
    child.once("error", reject);
    child.once("close", (code) =>
      code === 0 ? resolve() : reject(new Error(`${compiler} failed on ${args.at(-1)}`)),
    );
  });
}

/** Compiles all units, as many at a time as there are processors, into `work`; answers the objects. */
async function compile(compiler, units, work) {
  const objects = units.map((unit) => join(work, `${unit.split("/").at(-1)}.o`));
  let next = 0;
  const take = async () => {
    // A failure ends all: `next` is beyond the last unit then.
    while (next < units.length) {
      const index = next++;
      process.stderr.write(
        `kv_nixl: compiling ${index + 1}/${units.length} ${units[index].split("/").at(-1)}\n`,
      );
      await run(compiler, [...FLAGS, "-c", "-o", objects[index], units[index]]).catch((error) => {
        next = units.length;
        throw error;
      });
    }
  };
  const outcomes = await Promise.allSettled(Array.from({ length: availableParallelism() }, take));
  for (const outcome of outcomes) if (outcome.status === "rejected") throw outcome.reason;
  return objects;
}

async function buildAll(compiler, digest) {
  // A folder of its own, since two builds may run at once; results are renamed into place, since they may be in use.
  const work = join(build, `work-${process.pid}`);
  mkdirSync(work, { recursive: true });
  try {
    const units = sourcesIn("src").filter((file) => file.endsWith(".cc"));
    const objects = await compile(compiler, units, work);
    await run(compiler, [...objects, ...LINK, "-o", join(work, "addon")]);
    await run(compiler, [
      ...FLAGS,
      join(here, "fake", "fake_nixl_capi.cc"),
      ...LINK,
      "-o",
      join(work, "fake"),
    ]);
    if (sanitize.length === 0) {
      mkdirSync(dirname(packaged), { recursive: true });
      copyFileSync(join(work, "addon"), `${packaged}.${process.pid}`);
      renameSync(`${packaged}.${process.pid}`, packaged);
    }
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
const digest = digestOf(compiler, [...sourcesIn("src"), join(here, "fake", "fake_nixl_capi.cc")]);
const built = [addon, fake, packaged, stamp].every((file) => existsSync(file));
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
try {
  buildNeuron(compiler, { force: process.argv.includes("--force") });
} catch (error) {
  console.error(`kv_neuron: ${error.message}`);
  process.exit(1);
}
