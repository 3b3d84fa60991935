// What every build of the addon shares: its sources, its flags, and how units become objects.
import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { availableParallelism } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

export const here = dirname(fileURLToPath(import.meta.url));
const require = createRequire(import.meta.url);
const NAPI_VERSION = 8;

const headers = (name, ...inside) => join(dirname(require.resolve(`${name}/package.json`)), ...inside);

export const OPTIMISED = ["-O3"];
export const FLAGS = [
  "-std=c++20",
  ..."-fPIC -fvisibility=hidden -Wall -Wextra -Wno-missing-field-initializers -pthread".split(" "),
  `-DNAPI_VERSION=${NAPI_VERSION}`,
  ..."-DNAPI_CPP_EXCEPTIONS -DNODE_ADDON_API_DISABLE_DEPRECATED -DBUILDING_NODE_EXTENSION".split(" "),
  // What is thrown while an environment ends has nowhere to go, and must not end the process.
  "-DNODE_API_SWALLOW_UNTHROWABLE_EXCEPTIONS",
  ...["-isystem", headers("node-api-headers", "include"), "-isystem", headers("node-addon-api")],
];
// nodelete: Node unloads an addon when the last worker that loaded it ends, and an agent's thread may outlive that.
export const LINK = "-shared -pthread -Wl,-z,nodelete -Wl,--as-needed -ldl".split(" ");

export function sourcesIn(folder) {
  return readdirSync(join(here, folder))
    .sort()
    .map((name) => join(here, folder, name));
}

/** One string for everything that the result depends on. */
export function digestOf(settings, files) {
  const hash = createHash("sha256").update(JSON.stringify(settings));
  for (const file of files)
    hash.update(file.slice(here.length)).update("\0").update(readFileSync(file)).update("\0");
  return hash.digest("hex");
}

/** Runs `[program, ...args]` with what it says on the terminal. */
export function run([program, ...args], { env = process.env } = {}) {
  return new Promise((resolve, reject) => {
    const child = spawn(program, args, { stdio: ["ignore", "inherit", "inherit"], env });
    child.once("error", reject);
    child.once("close", (code) =>
      code === 0 ? resolve() : reject(new Error(`${program} failed on ${args.at(-1)}`)),
    );
  });
}

/** Compiles all units of the addon, as many at a time as there are processors, into `work`; answers the objects. */
export async function compile(compiler, flags, work, env = process.env) {
  const units = sourcesIn("src").filter((file) => file.endsWith(".cc"));
  const objects = units.map((unit) => join(work, `${unit.split("/").at(-1)}.o`));
  let next = 0;
  const take = async () => {
    // A failure ends all: `next` is beyond the last unit then.
    while (next < units.length) {
      const index = next++;
      process.stderr.write(
        `kv_nixl: compiling ${index + 1}/${units.length} ${units[index].split("/").at(-1)}\n`,
      );
      await run([...compiler, ...flags, "-c", "-o", objects[index], units[index]], { env }).catch((error) => {
        next = units.length;
        throw error;
      });
    }
  };
  const outcomes = await Promise.allSettled(Array.from({ length: availableParallelism() }, take));
  for (const outcome of outcomes) if (outcome.status === "rejected") throw outcome.reason;
  return objects;
}
