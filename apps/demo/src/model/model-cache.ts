import { randomUUID } from "node:crypto";
import { existsSync } from "node:fs";
import { mkdir, rename, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { exists } from "./checkpoint.js";

/** `node_modules/.cache/kv-demo` of the repository that this file is in; of the system's temporary directory elsewhere. */
export function defaultCacheDirectory(): string {
  let directory = dirname(fileURLToPath(import.meta.url));
  for (;;) {
    if (existsSync(join(directory, "pnpm-workspace.yaml"))) {
      return join(directory, "node_modules", ".cache", "kv-demo");
    }
    const parent = dirname(directory);
    if (parent === directory) return join(tmpdir(), "kv-demo");
    directory = parent;
  }
}

/**
 * The directory `cache/key`, filled by `write` when it does not exist. It appears complete or not at all: it is
 * written under another name and renamed, so that several processes may start at once and a killed one leaves
 * nothing that looks finished.
 */
export async function cachedDirectory(
  cache: string,
  key: string,
  write: (directory: string) => Promise<void>,
): Promise<string> {
  const target = join(cache, key);
  if (await exists(target)) return target;
  const draft = join(cache, `.${key}.${randomUUID()}`);
  await mkdir(draft, { recursive: true });
  try {
    await write(draft);
    await rename(draft, target);
  } catch (error) {
    await rm(draft, { recursive: true, force: true });
    // Another process was first: its directory came from the same key, so it is the same.
    if (!(await exists(target))) throw error;
  }
  return target;
}
