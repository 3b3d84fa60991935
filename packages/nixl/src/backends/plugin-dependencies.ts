import { readdir } from "node:fs/promises";
import { join } from "node:path";
import type { Environment } from "../environment.js";
import { cacheFolder } from "../library/cache-folder.js";

/** For each backend whose plugin needs libraries from outside the wheel: how their folder's name in the cache begins. */
const FOLDER_PREFIXES: Readonly<Record<string, string>> = { LIBFABRIC: "libfabric" };

/** The folder of the libraries that `kv-nixl install --with` installed for a backend's plugin; undefined when there is none. The newest version wins. */
export async function dependencyFolder(
  backend: string,
  environment: Environment = process.env,
): Promise<string | undefined> {
  const prefix = Object.hasOwn(FOLDER_PREFIXES, backend) ? FOLDER_PREFIXES[backend] : undefined;
  if (prefix === undefined) return undefined;
  const cache = cacheFolder(environment);
  const names = await readdir(cache).catch(() => [] as string[]);
  const [newest] = names
    .filter((name) => name.startsWith(`${prefix}-`))
    .sort((a, b) => b.localeCompare(a, "en", { numeric: true }));
  return newest === undefined ? undefined : join(cache, newest);
}

/** Variables that libraries of a dependency folder need. They are set where the user has not set them. */
export function variablesFor(
  folder: string,
  supplied: readonly string[],
): readonly (readonly [name: string, value: string])[] {
  // The pinned libfabric is built to look for its providers in another folder.
  return supplied.includes("libfabric.so.1") ? [["FI_PROVIDER_PATH", folder]] : [];
}
