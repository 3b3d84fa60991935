import { randomUUID } from "node:crypto";
import { access, mkdir, readdir, rename, rm } from "node:fs/promises";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import { cacheFolder, type Environment } from "./find-library.js";

const WORK_PREFIX = ".installing-";

/**
 * Makes the folder `name` in the user's cache: `make` fills a folder of its own, which appears under its name only when it
 * is complete, in place of the one that is there with `replace`. Two at a time do not disturb each other. Answers the folder. Errors: `KV_INSTALL_FAILED`.
 */
export async function makeInCache(
  name: string,
  environment: Environment,
  make: (unpacked: string, work: string) => Promise<void>,
  { replace = false }: { replace?: boolean } = {},
): Promise<string> {
  const cache = cacheFolder(environment);
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
    // What runs has its files open, and keeps them.
    if (replace) {
      await rename(folder, join(work, "replaced")).catch((error: NodeJS.ErrnoException) => {
        if (error.code === "ENOENT") return;
        throw new KvError("KV_INSTALL_FAILED", `cannot replace ${folder}: ${error.message}`);
      });
    }
    await rename(unpacked, folder).catch(async (error: Error) => {
      // Another installation was faster, and what it put there is the same.
      if (!(await exists(folder)))
        throw new KvError("KV_INSTALL_FAILED", `cannot create ${folder}: ${error.message}`);
    });
  } finally {
    await rm(work, { recursive: true, force: true });
  }
  return folder;
}

/** What runs that were killed have left, told by their process being gone. */
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
