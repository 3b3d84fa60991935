// The published addons, built against the oldest glibc that NIXL's own wheels support.
import { createHash } from "node:crypto";
import { existsSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import {
  COMMON_FLAGS,
  digestOf,
  FLAGS,
  LINK,
  NODE_API_FLAGS,
  nativeRoot,
  OPTIMISED,
  sourcesIn,
} from "./compile.mjs";

export const GLIBC = "2.28";
// Node registers an addon by these symbols. Nothing else is exported.
export const EXPORTS = ["napi_register_module_v1", "node_api_module_get_api_version_v1"];

export const PLATFORMS = [
  { name: "linux-x64-gnu", target: `x86_64-linux-gnu.${GLIBC}` },
  { name: "linux-arm64-gnu", target: `aarch64-linux-gnu.${GLIBC}` },
].map((platform) => ({ ...platform, folder: join(nativeRoot, "npm", platform.name) }));

export const exportMap = () => `{ global: ${EXPORTS.join("; ")}; local: *; };\n`;
export const link = (map) => [...LINK, "-s", `-Wl,--version-script=${map}`];

export const addonOf = ({ folder }) => join(folder, "kv_nixl.node");

/** `folder` is below `native/`. With `-O2` Zig links less of its C++ runtime. */
const nixl = (platform) => ({
  name: "kv_nixl",
  platform,
  folder: "src",
  flags: [...FLAGS, ...OPTIMISED],
  linkFlags: [],
  file: addonOf(platform),
});
const neuron = (platform) => ({
  name: "kv_neuron",
  platform,
  folder: "neuron",
  flags: [...COMMON_FLAGS, ...NODE_API_FLAGS, "-O2", `-I${nativeRoot}`],
  linkFlags: ["-O2"],
  file: join(
    nativeRoot,
    "../packages/neuron/native",
    platform.name.replace(/-gnu$/, ""),
    "kv_neuron.node",
  ),
});
export const addonsFor = (platform) => [neuron(platform), nixl(platform)];

export const sourcesDigest = ({ platform, folder, flags }) =>
  digestOf([platform.target, flags, link(exportMap())], sourcesIn(folder));

const stampOf = ({ name, platform }) =>
  join(nativeRoot, "build", `${name}-${platform.name}.digest`);
/** Covers the sources and the file, which `native/build.mjs` may have replaced. */
const stampText = (addon) => {
  const built = createHash("sha256").update(readFileSync(addon.file)).digest("hex");
  return `${sourcesDigest(addon)} ${built}`;
};
export const markBuilt = (addon) => writeFileSync(stampOf(addon), stampText(addon));

export const isBuilt = (addon) =>
  existsSync(addon.file) &&
  existsSync(stampOf(addon)) &&
  readFileSync(stampOf(addon), "utf8") === stampText(addon);
export const isCurrent = (platform) => isBuilt(nixl(platform));

/** Removes addons of @kv/nixl that were built from other sources. */
export function removeOutdatedAddons() {
  for (const platform of PLATFORMS)
    if (!isCurrent(platform)) rmSync(addonOf(platform), { force: true });
}
