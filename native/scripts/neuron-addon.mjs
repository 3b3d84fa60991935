// The addon of @kv/neuron as it is published: for one platform, against the oldest glibc that
// @kv/nixl supports. `native/build.mjs` builds the same unit with this machine's compiler, for
// tests.
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { COMMON_FLAGS, digestOf, NODE_API_FLAGS, nativeRoot, run } from "./compile.mjs";
import { elfNeeds, violations } from "./elf-needs.mjs";
import { EXPORTS, exportMap, GLIBC, link } from "./platform-packages.mjs";

const SOURCES = ["neuron/addon.cc", "neuron/nrt_api.h"].map((path) => join(nativeRoot, path));
const flags = [...COMMON_FLAGS, ...NODE_API_FLAGS, "-O2"];

const folderOf = ({ name }) =>
  join(nativeRoot, "../packages/neuron/native", name.replace(/-gnu$/, ""));
const addonOf = (platform) => join(folderOf(platform), "kv_neuron.node");
const stampOf = ({ name }) => join(nativeRoot, "build", `neuron-${name}.digest`);

/**
 * A digest of what the addon was built from and of the addon itself, which `native/build.mjs` may
 * have replaced.
 */
function digestFor(platform) {
  const sources = digestOf([platform.target, flags, link(exportMap())], SOURCES);
  const addon = addonOf(platform);
  const built = existsSync(addon)
    ? createHash("sha256").update(readFileSync(addon)).digest("hex")
    : "";
  return `${sources} ${built}`;
}

/**
 * Whether the addon for the platform exists and was built from the present source and flags by
 * `buildNeuronAddon`.
 */
export const isNeuronCurrent = (platform) =>
  existsSync(addonOf(platform)) &&
  existsSync(stampOf(platform)) &&
  readFileSync(stampOf(platform), "utf8") === digestFor(platform);

/**
 * Builds the addon for the platform. Throws when it would not load on every Linux with that glibc.
 */
export async function buildNeuronAddon(platform, { compiler, env }) {
  const work = join(nativeRoot, "build", `work-neuron-${platform.name}-${process.pid}`);
  mkdirSync(work, { recursive: true });
  mkdirSync(folderOf(platform), { recursive: true });
  try {
    const map = join(work, "exports.map");
    writeFileSync(map, exportMap());
    const addon = join(work, "addon");
    await run(
      [...compiler, "-target", platform.target, ...flags, SOURCES[0], ...link(map), "-o", addon],
      {
        env,
      },
    );
    const problems = violations(elfNeeds(addon), { glibc: GLIBC, exported: EXPORTS });
    if (problems.length > 0)
      throw new Error(`kv_neuron for ${platform.name} ${problems.join("; it ")}`);
    renameSync(addon, addonOf(platform));
    writeFileSync(stampOf(platform), digestFor(platform));
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}
