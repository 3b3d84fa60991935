import { readdir } from "node:fs/promises";
import { join } from "node:path";
import type { Environment } from "../environment.js";
import { cacheFolder } from "../library/cache-folder.js";
import { libraryPackage } from "../library/library-package.js";

/** For each backend whose plugin needs libraries from outside the wheel: how their folder's name begins, in the cache and in the package. */
const FOLDER_PREFIXES: Readonly<Record<string, string>> = { LIBFABRIC: "libfabric" };

/**
 * The folder of the libraries from outside the wheel that a backend's plugin needs: what `kv-nixl install --with` installed, else that of the
 * optional package `@kv/nixl-libs-…`; undefined when there is none. The newest version wins.
 */
export async function dependencyFolder(
  backend: string,
  environment: Environment = process.env,
): Promise<string | undefined> {
  const prefix = Object.hasOwn(FOLDER_PREFIXES, backend) ? FOLDER_PREFIXES[backend] : undefined;
  if (prefix === undefined) return undefined;
  for (const place of [cacheFolder(environment), libraryPackage().folder]) {
    const names = place === undefined ? [] : await readdir(place).catch(() => [] as string[]);
    const [newest] = names
      .filter((name) => name.startsWith(`${prefix}-`))
      .sort((a, b) => b.localeCompare(a, "en", { numeric: true }));
    if (place !== undefined && newest !== undefined) return join(place, newest);
  }
  return undefined;
}

/** Variables that libraries of a dependency folder need. They are set where the user has not set them. */
export function variablesFor(
  folder: string,
  supplied: readonly string[],
): readonly (readonly [name: string, value: string])[] {
  // Providers of another libfabric, in a folder of the system, must not be loaded.
  return supplied.includes("libfabric.so.1") ? [["FI_PROVIDER_PATH", folder]] : [];
}
