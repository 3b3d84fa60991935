import { access, readdir } from "node:fs/promises";
import { join } from "node:path";
import { cacheFolder, type Environment } from "./library.js";

/** Libraries of others that a plugin needs and that `kv-nixl install --with` has brought. */
export interface Companions {
  readonly folder: string;
  /** Variables that they need, where they are not set. */
  readonly variables: Readonly<Record<string, string>>;
}

/** By backend: the name of the folder in the cache. */
export const COMPANION_FOLDERS: Readonly<Record<string, string>> = { LIBFABRIC: "libfabric" };

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
  for (const entry of folders.sort((a, b) => b.localeCompare(a, "en", { numeric: true }))) {
    const folder = join(cache, entry);
    const complete = await access(join(folder, "libfabric.so.1")).then(
      () => true,
      () => false,
    );
    if (complete) return { folder, variables: { FI_PROVIDER_PATH: folder } };
  }
  return undefined;
}
