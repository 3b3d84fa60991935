import { randomUUID } from "node:crypto";
import { realpathSync } from "node:fs";
import { access, mkdir, readdir, rename, rm } from "node:fs/promises";
import { homedir } from "node:os";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import type { Environment } from "../environment.js";

const WORK_PREFIX = ".installing-";

/**
 * The user's cache, where `kv-nixl install` puts what it installs: `$XDG_CACHE_HOME/kv-nixl`, or
 * `~/.cache/kv-nixl`. Undefined for a user that has no home folder: in a container with a foreign
 * user id there is neither HOME nor an entry of /etc/passwd.
 */
export function cacheFolder(environment: Environment = process.env): string | undefined {
  const base = environment.XDG_CACHE_HOME;
  if (base?.startsWith("/")) return join(base, "kv-nixl");
  try {
    return join(environment.HOME ?? homedir(), ".cache", "kv-nixl");
  } catch {
    return undefined;
  }
}

/** The same. Throws `KV_INSTALL_FAILED` where there is none. */
export function requireCacheFolder(environment: Environment): string {
  const cache = cacheFolder(environment);
  if (cache !== undefined) return cache;
  throw new KvError(
    "KV_INSTALL_FAILED",
    "this user has no home folder: HOME is not set, and /etc/passwd has no entry",
    { hint: "set XDG_CACHE_HOME, or HOME, to a folder that can be written" },
  );
}

/**
 * The path with all links resolved, as NIXL does: its plugins lie beside the real file. Returns
 * `path` where there is no file.
 */
export function realLibrary(path: string): string {
  try {
    return realpathSync(path);
  } catch {
    return path;
  }
}

/**
 * CUDA's major version and NIXL's version, read from the name of an installation's folder in the
 * cache, such as `nixl-cu12-1.5.0-x86_64`.
 */
export function parseInstallFolder(name: string): { cuda: string; version: string } | undefined {
  const [, cuda, version] = /^nixl-cu(\d+)-([0-9][0-9.a-z]*)-/.exec(name) ?? [];
  return cuda === undefined || version === undefined ? undefined : { cuda, version };
}

/**
 * Creates the folder `name` in the user's cache and returns its path. `make` fills a temporary
 * folder, which is renamed when it is complete; with `replace` it takes the place of an existing
 * one. Two processes may do this at the same time. Rejects with `KV_INSTALL_FAILED`, or with what
 * `make` rejects with.
 */
export async function makeInCache(
  name: string,
  environment: Environment,
  make: (unpacked: string, work: string) => Promise<void>,
  { replace = false }: { replace?: boolean | undefined } = {},
): Promise<string> {
  const cache = requireCacheFolder(environment);
  const folder = join(cache, name);
  await mkdir(cache, { recursive: true }).catch((error: Error) => {
    throw new KvError("KV_INSTALL_FAILED", `cannot create ${cache}: ${error.message}`, {
      hint: "set XDG_CACHE_HOME to a folder that can be written",
    });
  });
  await removeLeftovers(cache);
  const work = join(cache, `${WORK_PREFIX}${process.pid}-${randomUUID()}`);
  try {
    const unpacked = join(work, "unpacked");
    await mkdir(unpacked, { recursive: true });
    await make(unpacked, work);
    // Running processes keep the files that they have opened.
    if (replace) {
      await rename(folder, join(work, "replaced")).catch((error: NodeJS.ErrnoException) => {
        if (error.code === "ENOENT") return;
        throw new KvError("KV_INSTALL_FAILED", `cannot replace ${folder}: ${error.message}`);
      });
    }
    await rename(unpacked, folder).catch(async (error: Error) => {
      // Another process has installed the same meanwhile.
      if (!(await exists(folder)))
        throw new KvError("KV_INSTALL_FAILED", `cannot create ${folder}: ${error.message}`);
    });
  } finally {
    await rm(work, { recursive: true, force: true });
  }
  return folder;
}

/**
 * Removes the temporary folders of processes that were killed: their process id is no longer alive.
 */
async function removeLeftovers(cache: string): Promise<void> {
  for (const name of await readdir(cache)) {
    const pid = name.startsWith(WORK_PREFIX)
      ? Number.parseInt(name.slice(WORK_PREFIX.length), 10)
      : Number.NaN;
    if (Number.isNaN(pid) || isAlive(pid)) continue;
    await rm(join(cache, name), { recursive: true, force: true });
  }
}

function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === "EPERM";
  }
}

/** Whether there is a file or folder at `path`. */
export async function exists(path: string): Promise<boolean> {
  return access(path).then(
    () => true,
    () => false,
  );
}
