import { spawnSync } from "node:child_process";
import { copyFileSync, mkdirSync, readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { nativeRoot } from "./compile.mjs";

const root = join(nativeRoot, "..");
const manifestIn = (folder) => JSON.parse(readFileSync(join(root, folder, "package.json"), "utf8"));

/** @kv/nixl and the workspace packages that npm installs with it. */
export function nixlPackages() {
  const found = new Set(["@kv/nixl"]);
  for (const name of found) {
    const { dependencies = {} } = manifestIn(`packages/${name.slice("@kv/".length)}`);
    for (const [each, range] of Object.entries(dependencies))
      if (range.startsWith("workspace:")) found.add(each);
  }
  return [...found];
}

/** Both packages of NIXL's libraries have the same one. No package runs a script. */
export function copyAttributions(tree) {
  const npm = join(tree, "native", "npm");
  for (const name of readdirSync(npm).filter((each) => each.startsWith("libs-")))
    copyFileSync(join(npm, "ATTRIBUTIONS.md"), join(npm, name, "ATTRIBUTIONS.md"));
}

/** Packs into native/build/packages. Returns the paths of the tarballs. */
export function pack(names) {
  const into = join(nativeRoot, "build", "packages");
  mkdirSync(into, { recursive: true });
  copyAttributions(root);
  const filters = names.flatMap((name) => ["--filter", name]);
  const args = ["--recursive", ...filters, "pack", "--json", "--pack-destination", into];
  const { status, stdout } = spawnSync("npx", ["--yes", manifestIn(".").packageManager, ...args], {
    cwd: root,
    encoding: "utf8",
    stdio: ["ignore", "pipe", "inherit"],
    maxBuffer: 64 << 20,
  });
  if (status !== 0) throw new Error(`packing ended with ${status}`);
  // For one package pnpm prints no list.
  return [JSON.parse(stdout)].flat().map(({ filename }) => filename);
}
