// What tools fetch once, in the user's cache.
import { existsSync, mkdirSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { run } from "./setup.mjs";

export const userCache = process.env.XDG_CACHE_HOME || join(homedir(), ".cache");
export const cache = join(userCache, "kv-nixl");

/** A folder of the cache. `fill` writes into an empty one, which takes its place when it is whole. */
export async function cachedFolder(name, fill) {
  const folder = join(cache, name);
  if (existsSync(folder)) return folder;
  const work = `${folder}.${process.pid}`;
  mkdirSync(work, { recursive: true });
  try {
    await fill(work);
    // Another process may have been faster.
    if (!existsSync(folder)) renameSync(work, folder);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
  return folder;
}

/** A virtual environment of Python: its `bin`, and whether it is complete. */
const pythonFolder = (name) => ({
  bin: join(cache, name, "bin"),
  ready: join(cache, name, "ready"),
});
export const hasPython = (name) => existsSync(pythonFolder(name).ready);

/** Makes one, and returns its `bin`. `installs`: arguments of pip, for each call of it. */
export async function pythonWith(name, installs) {
  const { bin, ready } = pythonFolder(name);
  if (existsSync(ready)) return bin;
  process.stderr.write(`set up ${installs.flat().at(-1)} (once) …\n`);
  await run("python3", ["-m", "venv", "--clear", join(cache, name)]);
  for (const install of installs)
    await run(join(bin, "python"), ["-m", "pip", "install", "-q", ...install]);
  writeFileSync(ready, "");
  return bin;
}
