// The npm packages that contain the addon, one for each platform, and whether the addon in them is
// up to date with the sources.
import { existsSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { digestOf, FLAGS, LINK, nativeRoot, OPTIMISED, sourcesIn } from "./compile.mjs";

// The oldest glibc that NIXL's own wheels support.
export const GLIBC = "2.28";
// The symbols by which Node registers an addon. Nothing else is exported.
export const EXPORTS = ["napi_register_module_v1", "node_api_module_get_api_version_v1"];

export const PLATFORMS = [
  { name: "linux-x64-gnu", target: `x86_64-linux-gnu.${GLIBC}` },
  { name: "linux-arm64-gnu", target: `aarch64-linux-gnu.${GLIBC}` },
].map((platform) => ({ ...platform, folder: join(nativeRoot, "npm", platform.name) }));

export const exportMap = () => `{ global: ${EXPORTS.join("; ")}; local: *; };\n`;
export const flags = [...FLAGS, ...OPTIMISED];
export const link = (map) => [...LINK, "-s", `-Wl,--version-script=${map}`];

/** The path of a platform's addon. */
export const addonOf = ({ folder }) => join(folder, "kv_nixl.node");
const stampOf = ({ name }) => join(nativeRoot, "build", `${name}.digest`);
export const digestFor = ({ target }) =>
  digestOf([target, flags, link(exportMap())], sourcesIn("src"));

/** Whether a platform's addon exists and was built from the present sources and flags. */
export const isCurrent = (platform) =>
  existsSync(addonOf(platform)) &&
  existsSync(stampOf(platform)) &&
  readFileSync(stampOf(platform), "utf8") === digestFor(platform);
export const markBuilt = (platform, digest) => writeFileSync(stampOf(platform), digest);

/** Removes the addons that were built from other sources. */
export function removeOutdatedAddons() {
  for (const platform of PLATFORMS)
    if (!isCurrent(platform)) rmSync(addonOf(platform), { force: true });
}
