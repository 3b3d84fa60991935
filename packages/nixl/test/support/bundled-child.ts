import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { afterAll } from "vitest";
import { ADDON_OF_BUNDLES, bundle } from "./bundle.js";
import { type ChildEnd, run } from "./run-child.js";

/**
 * Bundles a file of `children/` for tests that run it many times; returns a function that runs it
 * to its end.
 */
export async function bundledChild(
  file: string,
): Promise<(args: readonly string[], env?: Record<string, string>) => Promise<ChildEnd>> {
  const folder = await mkdtemp(join(tmpdir(), "kv-nixl-child-"));
  afterAll(() => rm(folder, { recursive: true, force: true }));
  const path = await bundle(fileURLToPath(new URL(`../children/${file}`, import.meta.url)), folder);
  return (args, env = {}) => run([path, ...args], { env: { ...ADDON_OF_BUNDLES, ...env } });
}
