import { execFile } from "node:child_process";
import { realpathSync } from "node:fs";
import { access, constants, readdir } from "node:fs/promises";
import { homedir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";
import { KvError, type Log } from "@kv/interface";
import { requireObject } from "../validate.js";

export const LIBRARY_FILE = "libnixl_capi.so";
/** Folders in which the wheels keep the library, beside a package or in site-packages. */
const WHEEL_FOLDERS = [
  ".nixl_cu12.mesonpy.libs",
  ".nixl_cu13.mesonpy.libs",
  "nixl_cu12.libs",
  "nixl_cu13.libs",
];
const PREFIX_FOLDERS = ["lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "."];
const PYTHON_TIMEOUT_MS = 5000;

export type Environment = Readonly<Record<string, string | undefined>>;

export interface FindLibraryOptions {
  /** Path of the library; nothing else is tried then. */
  library?: string;
  environment?: Environment;
}

/** The user's cache of `kv-nixl install`: `$XDG_CACHE_HOME/kv-nixl`, or `~/.cache/kv-nixl`. */
export function cacheFolder(environment: Environment = process.env): string {
  const base = environment.XDG_CACHE_HOME;
  return join(base?.startsWith("/") ? base : join(environment.HOME ?? homedir(), ".cache"), "kv-nixl");
}

/** The file behind the links: NIXL follows them, and has its plugins beside it. The path itself where there is none. */
export function realLibrary(path: string): string {
  try {
    return realpathSync(path);
  } catch {
    return path;
  }
}

export interface LocatedLibrary {
  readonly path: string;
  /** Which of the places it came from, such as `KV_NIXL_LIBRARY` or `kv-nixl install`. */
  readonly source: string;
}

/** Where `locateLibrary` finds it. Errors: `KV_LIBRARY_NOT_FOUND`. */
export async function findLibrary(options: FindLibraryOptions = {}): Promise<string> {
  return (await locateLibrary(options)).path;
}

/**
 * Finds `libnixl_capi.so`: the option, `KV_NIXL_LIBRARY`, `NIXL_PREFIX`, what `kv-nixl install` unpacked, the pip
 * environments (`VIRTUAL_ENV`, `CONDA_PREFIX`, python3's), then the loader's own search. A place that was named and has no library
 * is an error, not passed over. Errors: `KV_LIBRARY_NOT_FOUND` with every place tried and why it failed.
 */
export async function locateLibrary(options: FindLibraryOptions = {}): Promise<LocatedLibrary> {
  requireObject(options, "KV_LIBRARY_NOT_FOUND", "where to look for NIXL");
  const environment = options.environment ?? process.env;
  const attempts: string[] = [];
  const found = async (
    candidates: readonly string[],
    source: string,
  ): Promise<LocatedLibrary | undefined> => {
    for (const path of candidates) {
      const reason = await unreadable(path);
      if (reason === undefined) return { path, source };
      attempts.push(`${path} (${source}): ${reason}`);
    }
    return undefined;
  };
  const named: [source: string, paths: string[]][] = [];
  if (options.library !== undefined) named.push(["the option library", [options.library]]);
  else if (environment.KV_NIXL_LIBRARY) named.push(["KV_NIXL_LIBRARY", [environment.KV_NIXL_LIBRARY]]);
  else if (environment.NIXL_PREFIX)
    named.push(["NIXL_PREFIX", below(environment.NIXL_PREFIX, PREFIX_FOLDERS)]);
  for (const [source, paths] of named) {
    const path = await found(paths, source);
    if (path !== undefined) return path;
    throw notFound(attempts);
  }
  const installed = await found(await installedIn(cacheFolder(environment)), "kv-nixl install");
  if (installed !== undefined) return installed;
  for (const [folder, source] of await pipFolders(environment, attempts)) {
    const path = await found(below(folder, WHEEL_FOLDERS), source);
    if (path !== undefined) return path;
  }
  const byLoader = await found(
    loaderFolders(environment).map((folder) => join(folder, LIBRARY_FILE)),
    "the loader",
  );
  if (byLoader !== undefined) return byLoader;
  throw notFound(attempts);
}

/** The variables that name a library, in their order; the option `library` comes before them. */
const NAMING = ["KV_NIXL_LIBRARY", "NIXL_PREFIX"] as const;

/** Warns of each variable that names a library and lost, with its value and what won. */
export function warnOfUnusedVariables(choice: {
  library: string | undefined;
  environment: Environment;
  log: Log;
}): void {
  const { library, environment, log } = choice;
  const set = NAMING.flatMap((name) => {
    const value = environment[name];
    return value ? [{ name: name as string, value }] : [];
  });
  if (library !== undefined) set.unshift({ name: "the option library", value: library });
  const [winner, ...lost] = set;
  for (const { name, value } of lost) {
    const won = `${winner?.value} from ${winner?.name}`;
    log.warn("nixl-variable-unused", { name, value, won, why: `${winner?.name} comes first` });
  }
}

async function unreadable(path: string): Promise<string | undefined> {
  try {
    await access(path, constants.R_OK);
    return undefined;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === "ENOENT" ? "no such file" : (error as Error).message;
  }
}

function below(folder: string, inside: readonly string[]): string[] {
  return inside.map((name) => join(folder, name, LIBRARY_FILE));
}

/** Libraries in the cache, newest version first. Folders in the making have another prefix. */
async function installedIn(cache: string): Promise<string[]> {
  const folders = await readdir(cache).catch(() => [] as string[]);
  const versions = folders
    .filter((name) => /^nixl-cu1[23]-[0-9]/.test(name))
    .sort((a, b) => b.localeCompare(a, "en", { numeric: true }));
  if (versions.length === 0) return [join(cache, `nixl-cu12-*`, LIBRARY_FILE)];
  return versions.flatMap((name) =>
    below(
      join(cache, name),
      WHEEL_FOLDERS.filter((folder) => folder.includes(name.slice(5, 9)) && folder.startsWith(".")),
    ),
  );
}

async function pipFolders(
  environment: Environment,
  attempts: string[],
): Promise<[folder: string, source: string][]> {
  const folders: [string, string][] = [];
  for (const variable of ["VIRTUAL_ENV", "CONDA_PREFIX"]) {
    const prefix = environment[variable];
    if (!prefix) continue;
    const pythons = (await readdir(join(prefix, "lib")).catch(() => [])).filter((name) =>
      /^python3/.test(name),
    );
    if (pythons.length === 0) attempts.push(`${prefix} (${variable}): no lib/python3.*`);
    for (const name of pythons) folders.push([join(prefix, "lib", name, "site-packages"), variable]);
  }
  try {
    const script =
      "import json,site,sys;print(json.dumps(site.getsitepackages()+[site.getusersitepackages()]))";
    const { stdout } = await promisify(execFile)("python3", ["-c", script], {
      timeout: PYTHON_TIMEOUT_MS,
      env: environment as NodeJS.ProcessEnv,
    });
    for (const folder of JSON.parse(stdout) as string[]) folders.push([folder, "python3"]);
  } catch (error) {
    attempts.push(`python3's site-packages: ${(error as Error).message.split("\n")[0]}`);
  }
  return folders;
}

function loaderFolders(environment: Environment): string[] {
  const listed = (environment.LD_LIBRARY_PATH ?? "").split(":").filter((folder) => folder !== "");
  return [
    ...listed,
    "/usr/local/lib",
    "/usr/lib",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/opt/nvidia/nvda_nixl/lib",
  ];
}

function notFound(attempts: readonly string[]): KvError {
  return new KvError(
    "KV_LIBRARY_NOT_FOUND",
    `NIXL (${LIBRARY_FILE}) was not found; tried:\n  ${attempts.join("\n  ")}`,
    {
      hint: "run: npx --no-install kv-nixl install",
      details: { attempts },
    },
  );
}
