import { existsSync } from "node:fs";
import { join, parse } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const NATIVE = fileURLToPath(new URL("../../../../native", import.meta.url));
/** The addon that a process in the repository loads. */
const ADDON = [`npm/linux-${process.arch}-gnu`, "build"]
  .map((folder) => join(NATIVE, folder, "kv_nixl.node"))
  .find((file) => existsSync(file));

/**
 * Bundles a TypeScript file and its imports into one JavaScript file in `folder`, and returns its
 * path: a process that loads TypeScript takes longer to start than most tests take. The imports
 * must not look for files beside themselves.
 */
export async function bundle(file: string, folder: string): Promise<string> {
  const { name } = parse(file);
  const outfile = join(folder, `${name}.mjs`);
  await build({
    entryPoints: [file],
    outfile,
    bundle: true,
    format: "esm",
    platform: "node",
    target: "node20",
    logLevel: "error",
  });
  return outfile;
}

/** Variables with which a bundle finds the addon, which is in another folder. */
export const ADDON_OF_BUNDLES = { KV_NIXL_ADDON: process.env["KV_NIXL_ADDON"] ?? ADDON ?? "" };
