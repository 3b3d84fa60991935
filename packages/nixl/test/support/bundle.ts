import { existsSync } from "node:fs";
import { join, parse } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "tsup";

const NATIVE = fileURLToPath(new URL("../../../../native", import.meta.url));
/** The addon that a process in the repository loads. */
const ADDON = [`npm/linux-${process.arch}-gnu`, "build"]
  .map((folder) => join(NATIVE, folder, "kv_nixl.node"))
  .find((file) => existsSync(file));

/**
 * Bundles a TypeScript file and its imports into one JavaScript file in `folder`, and returns its path: a process that loads TypeScript takes
 * longer to start than most tests take. The imports must not look for files beside themselves.
 */
export async function bundle(file: string, folder: string): Promise<string> {
  const { name } = parse(file);
  await build({
    entry: { [name]: file },
    outDir: folder,
    format: ["esm"],
    outExtension: () => ({ js: ".mjs" }),
    target: "node20",
    noExternal: [/./],
    config: false,
    silent: true,
  });
  return join(folder, `${name}.mjs`);
}

/** Variables with which a bundle finds the addon, which is in another folder. */
export const ADDON_OF_BUNDLES = { KV_NIXL_ADDON: process.env["KV_NIXL_ADDON"] ?? ADDON ?? "" };
