import { randomUUID } from "node:crypto";
import { realpathSync } from "node:fs";
import { access, mkdir, readdir, readFile, rename, rm, writeFile } from "node:fs/promises";
import { homedir } from "node:os";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import type { Environment } from "../environment.js";

/** This file names the selected installation's folder. */
const SELECTED = "selected";
const WORK_PREFIX = ".installing-";

/**
 * `$XDG_CACHE_HOME/kv-nixl`, or `~/.cache/kv-nixl`. Undefined without a home folder: a foreign user
 * id in a container has neither HOME nor an entry of /etc/passwd.
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

/** Throws `KV_INSTALL_FAILED`. */
export function requireCacheFolder(environment: Environment): string {
  const cache = cacheFolder(environment);
  if (cache !== undefined) return cache;
  throw new KvError(
    "KV_INSTALL_FAILED",
    "this user has no home folder: HOME is not set, and /etc/passwd has no entry",
    { hint: "set XDG_CACHE_HOME, or HOME, to a folder that can be written" },
  );
}

/** Resolves all links, as NIXL does: its plugins lie beside the real file. */
export function realLibrary(path: string): string {
  try {
    return realpathSync(path);
  } catch {
    return path;
  }
}

/** Versions from the name of an installation's folder, such as `nixl-cu12-1.5.0-x86_64`. */
export function parseInstallFolder(name: string): { cuda: string; version: string } | undefined {
  const [, cuda, version] = /^nixl-cu(\d+)-([0-9][0-9.a-z]*)-/.exec(name) ?? [];
  return cuda === undefined || version === undefined ? undefined : { cuda, version };
}

export async function selectedInstallation(cache: string): Promise<string | undefined> {
  return await readFile(join(cache, SELECTED), "utf8").then(
    (text) => text.trim(),
    () => undefined,
  );
}

/** Writes nothing where it is selected already. Rejects with `KV_INSTALL_FAILED`. */
export async function selectInstallation(name: string, environment: Environment): Promise<void> {
  const cache = requireCacheFolder(environment);
  if ((await selectedInstallation(cache)) === name) return;
  const file = join(cache, SELECTED);
  await writeFile(file, `${name}\n`).catch((error: Error) => {
    throw new KvError("KV_INSTALL_FAILED", `cannot write ${file}: ${error.message}`, {
      hint: `set XDG_CACHE_HOME to a folder that can be written, or KV_NIXL_LIBRARY to the libnixl_capi.so in ${join(cache, name)}`,
    });
  });
}

/**
 * `make` fills a temporary folder, which is renamed once complete; `replace` lets it replace an
 * existing one. Two processes may do this at once. Rejects with `KV_INSTALL_FAILED`, or with the
 * error of `make`.
 */
export async function makeInCache(
  name: string,
  environment: Environment,
  make: (unpacked: string, work: string) => Promise<void>,
  { replace = false }: { replace?: boolean | undefined } = {},
): Promise<string> {
  const cache = requireCacheFolder(environment);
  const folder = join(cache, name);
  const work = join(cache, `${WORK_PREFIX}${process.pid}-${randomUUID()}`);
  const unpacked = join(work, "unpacked");
  await mkdir(unpacked, { recursive: true }).catch((error: Error) => {
    throw new KvError("KV_INSTALL_FAILED", `cannot write into ${cache}: ${error.message}`, {
      hint: "set XDG_CACHE_HOME to a folder that can be written",
    });
  });
  try {
    await removeLeftovers(cache);
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

/** Removes the temporary folders of processes that were killed. */
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

export async function exists(path: string): Promise<boolean> {
  return access(path).then(
    () => true,
    () => false,
  );
}
