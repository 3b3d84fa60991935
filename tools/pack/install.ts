import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdir, readdir } from "node:fs/promises";
import { join } from "node:path";
import { root } from "../release/packages.js";
import { closure, isForPlatform, manifests, packAll } from "./tarballs.js";

const BUILDS = ["build-platforms.mjs", "build-libs.mjs"];

function fits(name: string): boolean {
  const { os, cpu } = manifests.get(name) ?? {};
  const onThis = (list: readonly string[] | undefined, value: string) =>
    list?.includes(value) ?? true;
  return onThis(os, process.platform) && onThis(cpu, process.arch);
}

/**
 * Packs our packages of an install line, with all that they need here, into an empty folder.
 * Returns npm's command with the tarballs in their place.
 */
export async function packForInstall(
  line: readonly string[],
  folder: string,
  say: (text: string) => void,
): Promise<string> {
  const wanted = line.filter((each) => each.startsWith("@kv/"));
  const unknown = wanted.filter((name) => !manifests.has(name));
  const published = [...manifests.keys()].filter((name) => !isForPlatform(name)).sort();
  if (unknown.length > 0 || wanted.length === 0)
    throw new Error(`${unknown[0] ?? "no package"}: the packages are ${published.join(", ")}`);
  await mkdir(folder, { recursive: true });
  if ((await readdir(folder)).length > 0)
    throw new Error(`${folder} is not empty: give another one with --out`);
  const needed = [...closure(wanted)].filter(fits);
  const native = needed.filter(isForPlatform);
  const hasAddon = needed.includes("@kv/nixl") || needed.includes("@kv/neuron");
  if (native.length > 0) await build(`${process.platform}-${process.arch}-gnu`);
  else if (hasAddon)
    say(`there is no addon for ${process.platform} on ${process.arch}: NIXL will not load there`);
  const tarballs = await packAll(folder, needed);
  const others = line.filter((each) => !wanted.includes(each));
  say(
    `${tarballs.size} packages are in ${folder}. In your project (npm init -y && npm pkg set type=module) run:`,
  );
  // A shell of Windows expands no pattern.
  const files = process.platform === "win32" ? [...tarballs.values()] : [join(folder, "*.tgz")];
  return ["npm install", ...others, ...files].join(" ");
}

async function build(platform: string): Promise<void> {
  for (const script of BUILDS) {
    const args = [join(root, "native/scripts", script), "--platform", platform];
    const [code] = await once(spawn(process.execPath, args, { stdio: ["ignore", 2, 2] }), "close");
    if (code !== 0) throw new Error(`${script} ended with ${code}`);
  }
}
