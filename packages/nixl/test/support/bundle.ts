import { join, parse } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "tsup";

const ADDON = fileURLToPath(new URL("../../../../native/build/kv_nixl.node", import.meta.url));

/**
 * Makes one file of JavaScript in `folder` of a TypeScript file and all that it imports: to load TypeScript takes a process longer than
 * most of what the tests have it do. Answers its path. What it imports must not look for other files beside itself.
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

/** Where a bundle finds the addon, which lies nowhere near it. */
export const ADDON_OF_BUNDLES = { KV_NIXL_ADDON: process.env["KV_NIXL_ADDON"] ?? ADDON };
