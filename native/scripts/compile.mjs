import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { availableParallelism } from "node:os";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";

export const nativeRoot = dirname(dirname(fileURLToPath(import.meta.url)));
const NAPI_VERSION = 8;

/** The set-up loads this file before these dependencies are there. */
const headers = (name, ...inside) => join(nativeRoot, "node_modules", name, ...inside);

export const NODE_API_FLAGS = [
  `-DNAPI_VERSION=${NAPI_VERSION}`,
  ..."-DNAPI_CPP_EXCEPTIONS -DNODE_ADDON_API_DISABLE_DEPRECATED -DBUILDING_NODE_EXTENSION".split(
    " ",
  ),
  "-isystem",
  headers("node-api-headers", "include"),
  "-isystem",
  headers("node-addon-api"),
];
const WARNINGS =
  "-fPIC -fvisibility=hidden -Wall -Wextra -Wno-missing-field-initializers -pthread".split(" ");
export const COMMON_FLAGS = ["-std=c++20", ...WARNINGS];

export const OPTIMISED = ["-O3"];
export const FLAGS = [
  ...COMMON_FLAGS,
  ...NODE_API_FLAGS,
  // An exception thrown while an environment ends cannot be reported, and must not end the process.
  "-DNODE_API_SWALLOW_UNTHROWABLE_EXCEPTIONS",
  `-I${nativeRoot}`,
  `-I${join(nativeRoot, "src")}`,
];
// nodelete: Node unloads an addon with its last worker, but an agent's thread may run longer.
export const LINK = "-shared -pthread -Wl,-z,nodelete -Wl,--as-needed -ldl".split(" ");

/** Every file below a folder of `native/`, in a fixed order. */
export function sourcesIn(folder) {
  const at = join(nativeRoot, folder);
  return readdirSync(at, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath ?? entry.path, entry.name))
    .sort();
}

/** Hashes what a build result depends on: the settings, and the files' names and contents. */
export function digestOf(settings, files) {
  const hash = createHash("sha256").update(JSON.stringify(settings));
  for (const file of files)
    hash.update(file.slice(nativeRoot.length)).update("\0").update(readFileSync(file)).update("\0");
  return hash.digest("hex");
}

/** Rejects when the program exits with another code than 0. */
export function run([program, ...args], { env = process.env } = {}) {
  return new Promise((resolve, reject) => {
    const child = spawn(program, args, { stdio: ["ignore", "inherit", "inherit"], env });
    child.once("error", reject);
    child.once("close", (code) =>
      code === 0 ? resolve() : reject(new Error(`${program} failed on ${args.at(-1)}`)),
    );
  });
}

/** A part reads each header once for all of its units. */
const PARTS = 4;

/**
 * Compiles a folder's units into `work`, one part per processor at a time. Returns the object
 * files.
 */
export async function compile(compiler, flags, { sources, work, env = process.env }) {
  const units = sourcesIn(sources).filter((file) => file.endsWith(".cc"));
  const count = Math.min(PARTS, units.length);
  const parts = Array.from({ length: count }, (_, part) => {
    const source = join(work, `${sources.replaceAll("/", "-")}-${part + 1}.cc`);
    const own = units.filter((_unit, at) => at % count === part);
    writeFileSync(source, own.map((unit) => `#include "${relative(nativeRoot, unit)}"\n`).join(""));
    return { source, object: `${source}.o` };
  });
  const waiting = [...parts];
  const compileParts = async () => {
    for (let part = waiting.shift(); part !== undefined; part = waiting.shift()) {
      process.stderr.write(
        `kv_nixl: compiling ${sources}, part ${count - waiting.length} of ${count}\n`,
      );
      // After a failure no other part begins.
      await run([...compiler, ...flags, "-c", "-o", part.object, part.source], { env }).catch(
        (error) => {
          waiting.length = 0;
          throw error;
        },
      );
    }
  };
  const outcomes = await Promise.allSettled(
    Array.from({ length: availableParallelism() }, compileParts),
  );
  for (const outcome of outcomes) if (outcome.status === "rejected") throw outcome.reason;
  return parts.map(({ object }) => object);
}
