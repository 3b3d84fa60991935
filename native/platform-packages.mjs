// The packages that carry the addon, one for each platform, and whether what lies in them was made of today's sources.
import { existsSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { digestOf, FLAGS, here, LINK, OPTIMISED, sourcesIn } from "./compile.mjs";

// The oldest glibc that the wheels of NIXL run on, too.
export const GLIBC = "2.28";
// What the addon registers itself by; everything else stays inside.
export const EXPORTS = ["napi_register_module_v1", "node_api_module_get_api_version_v1"];

export const PLATFORMS = [
  { name: "linux-x64-gnu", target: `x86_64-linux-gnu.${GLIBC}` },
  { name: "linux-arm64-gnu", target: `aarch64-linux-gnu.${GLIBC}` },
].map((platform) => ({ ...platform, folder: join(here, "npm", platform.name) }));

export const exportMap = () => `{ global: ${EXPORTS.join("; ")}; local: *; };\n`;
export const flags = [...FLAGS, ...OPTIMISED];
export const link = (map) => [...LINK, "-s", `-Wl,--version-script=${map}`];

export const addonOf = ({ folder }) => join(folder, "kv_nixl.node");
const stampOf = ({ name }) => join(here, "build", `${name}.digest`);
export const digestFor = ({ target }) => digestOf([target, flags, link(exportMap())], sourcesIn("src"));

export const isCurrent = (platform) =>
  existsSync(addonOf(platform)) &&
  existsSync(stampOf(platform)) &&
  readFileSync(stampOf(platform), "utf8") === digestFor(platform);
export const markMade = (platform, digest) => writeFileSync(stampOf(platform), digest);

/** Removes what was made of other sources. */
export function dropOutdated() {
  for (const platform of PLATFORMS) if (!isCurrent(platform)) rmSync(addonOf(platform), { force: true });
}
