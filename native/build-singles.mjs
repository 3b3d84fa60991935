// Libraries of one unit each: compiled and linked in one go, and only when a source, a flag or the compiler has changed.
import { spawnSync } from "node:child_process";
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const require = createRequire(import.meta.url);
const headers = (name, ...inside) => join(dirname(require.resolve(`${name}/package.json`)), ...inside);
const FLAGS = [
  ..."-std=c++20 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-missing-field-initializers -pthread".split(
    " ",
  ),
  ..."-DNAPI_VERSION=8 -DNAPI_CPP_EXCEPTIONS -DNODE_ADDON_API_DISABLE_DEPRECATED -DBUILDING_NODE_EXTENSION".split(
    " ",
  ),
  ...["-isystem", headers("node-api-headers", "include"), "-isystem", headers("node-addon-api")],
  ..."-shared -Wl,-z,nodelete -Wl,--as-needed -static-libstdc++ -static-libgcc".split(" "),
];

/** `sources`: the unit, and what else it depends on. Throws when the compiler fails. */
export function buildSingles(compiler, targets, { force }) {
  for (const { sources, output, link = [] } of targets) {
    const files = sources.map((source) => join(here, source));
    const hash = createHash("sha256").update(JSON.stringify([compiler, FLAGS, link, process.arch]));
    for (const file of files) hash.update(readFileSync(file));
    const digest = hash.digest("hex");
    const stamp = join(here, "build", `${sources[0].replaceAll("/", "-")}.digest`);
    const fresh = existsSync(output) && existsSync(stamp) && readFileSync(stamp, "utf8") === digest;
    if (fresh && !force) continue;
    mkdirSync(dirname(output), { recursive: true });
    mkdirSync(dirname(stamp), { recursive: true });
    const work = `${output}.${process.pid}`;
    const { status } = spawnSync(compiler, [files[0], ...FLAGS, ...link, "-o", work, "-ldl"], {
      stdio: "inherit",
    });
    if (status !== 0) throw new Error(`${compiler} failed on ${sources[0]}`);
    renameSync(work, output);
    writeFileSync(stamp, digest);
    process.stderr.write(`native: built ${output.slice(dirname(here).length + 1)}\n`);
  }
}
