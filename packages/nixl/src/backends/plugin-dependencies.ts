import { readdir } from "node:fs/promises";
import { join } from "node:path";
import { cacheFolder, type Environment } from "../library/find-library.js";

/** Libraries of others that a plugin needs and that `kv-nixl install --with` has brought. */
export interface Companions {
  readonly folder: string;
}

/** By backend: the name of the folder in the cache. */
const COMPANION_FOLDERS: Readonly<Record<string, string>> = { LIBFABRIC: "libfabric" };

/** What was installed for a backend; undefined for nothing. */
export async function companionsOf(
  backend: string,
  environment: Environment = process.env,
): Promise<Companions | undefined> {
  const name = Object.hasOwn(COMPANION_FOLDERS, backend) ? COMPANION_FOLDERS[backend] : undefined;
  if (name === undefined) return undefined;
  const cache = cacheFolder(environment);
  const folders = (await readdir(cache).catch(() => [] as string[])).filter((entry) =>
    entry.startsWith(`${name}-`),
  );
  const newest = folders.sort((a, b) => b.localeCompare(a, "en", { numeric: true }))[0];
  return newest === undefined ? undefined : { folder: join(cache, newest) };
}

/** Variables that a library from a companion's folder needs, where they are not set. */
export function variablesFor(
  { folder }: Companions,
  supplied: readonly string[],
): readonly (readonly [name: string, value: string])[] {
  // It is built to look for its providers elsewhere.
  return supplied.includes("libfabric.so.1") ? [["FI_PROVIDER_PATH", folder]] : [];
}
