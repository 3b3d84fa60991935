import { access, constants, readdir } from "node:fs/promises";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import { runCommand } from "@kv/program";
import type { Environment } from "../environment.js";
import { DEFAULT_VERSION } from "../install/wheels.js";
import { requireOptions } from "../validate.js";
import { cacheFolder, selectedInstallation } from "./cache-folder.js";
import { libraryPackage } from "./library-package.js";

export const LIBRARY_FILE = "libnixl_capi.so";
/** Folders of the wheels that hold the library, in site-packages or in the cache. */
const WHEEL_FOLDERS = [
  ".nixl_cu12.mesonpy.libs",
  ".nixl_cu13.mesonpy.libs",
  "nixl_cu12.libs",
  "nixl_cu13.libs",
];
const PREFIX_FOLDERS = ["lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "."];
const PYTHON_TIMEOUT_MS = 5000;

/** Where to look for NIXL. */
export interface FindLibraryOptions {
  /** Path of the library. When it is given, no other place is tried. */
  readonly library?: string | undefined;
  /** The variables to read. @default process.env */
  readonly environment?: Environment | undefined;
}

export interface LocatedLibrary {
  /** Path of `libnixl_capi.so`. */
  readonly path: string;
  /** Where it was found, such as `KV_NIXL_LIBRARY`, `kv-nixl install` or a package's name. */
  readonly source: string;
}

/**
 * The path of the `libnixl_capi.so` that this process would load. Rejects with
 * `KV_LIBRARY_NOT_FOUND`, whose `details.attempts` lists every place that was tried.
 */
export async function findLibrary(options: FindLibraryOptions = {}): Promise<string> {
  return (await locateLibrary(options)).path;
}

/**
 * Tries, in this order: the option, `KV_NIXL_LIBRARY`, `NIXL_PREFIX`, the cache of
 * `kv-nixl install` (the selected installation, else the pinned version), the optional package
 * `@kv/nixl-libs-…`, the pip environments (`VIRTUAL_ENV`, `CONDA_PREFIX`, python3's), the loader's
 * folders. The first three end the search even without a library there. Rejects with
 * `KV_LIBRARY_NOT_FOUND`.
 */
export async function locateLibrary(options: FindLibraryOptions = {}): Promise<LocatedLibrary> {
  requireOptions(options, "KV_LIBRARY_NOT_FOUND", "the options of findLibrary", [
    "library",
    "environment",
  ]);
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
  else if (environment.KV_NIXL_LIBRARY)
    named.push(["KV_NIXL_LIBRARY", [environment.KV_NIXL_LIBRARY]]);
  else if (environment.NIXL_PREFIX)
    named.push(["NIXL_PREFIX", below(environment.NIXL_PREFIX, PREFIX_FOLDERS)]);
  for (const [source, paths] of named) {
    const path = await found(paths, source);
    if (path !== undefined) return path;
    throw notFound(attempts);
  }
  const cache = cacheFolder(environment);
  if (cache === undefined)
    attempts.push("the cache of kv-nixl install: this user has no home folder");
  const installed = cache && (await found(await installedIn(cache), "kv-nixl install"));
  if (installed) return installed;
  const { name, path: packaged } = libraryPackage();
  if (packaged !== undefined) return { path: packaged, source: name };
  attempts.push(`${name} (optional package): not installed`);
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

async function unreadable(path: string): Promise<string | undefined> {
  try {
    await access(path, constants.R_OK);
    return undefined;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === "ENOENT"
      ? "no such file"
      : (error as Error).message;
  }
}

function below(folder: string, inside: readonly string[]): string[] {
  return inside.map((name) => join(folder, name, LIBRARY_FILE));
}

/** The newest version first. */
export async function installations(cache: string): Promise<string[]> {
  const folders = await readdir(cache).catch(() => [] as string[]);
  // Unfinished installations have another prefix.
  return folders
    .filter((name) => /^nixl-cu1[23]-[0-9]/.test(name))
    .sort((a, b) => b.localeCompare(a, "en", { numeric: true }));
}

/** The selected installation first, else the default version, then the others. */
async function installedIn(cache: string): Promise<string[]> {
  const names = await installations(cache);
  const selected = await selectedInstallation(cache);
  const rank = (name: string) => {
    if (name === selected) return 0;
    const isDefault = name.includes(`-${DEFAULT_VERSION}-`);
    return isDefault ? (name.startsWith("nixl-cu12") ? 1 : 2) : 3;
  };
  if (names.length === 0) return [join(cache, `nixl-cu12-*`, LIBRARY_FILE)];
  return names
    .sort((a, b) => rank(a) - rank(b))
    .map((name) => join(cache, name, `.nixl_${name.slice(5, 9)}.mesonpy.libs`, LIBRARY_FILE));
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
    for (const name of pythons)
      folders.push([join(prefix, "lib", name, "site-packages"), variable]);
  }
  const script =
    "import json,site,sys;print(json.dumps(site.getsitepackages()+[site.getusersitepackages()]))";
  const { exitCode, how, stdout } = await runCommand("python3", ["-c", script], {
    timeoutMs: PYTHON_TIMEOUT_MS,
    env: environment,
  });
  try {
    if (exitCode !== 0) throw new Error(how);
    for (const folder of JSON.parse(stdout) as string[]) folders.push([folder, "python3"]);
  } catch (error) {
    attempts.push(`python3's site-packages: ${(error as Error).message}`);
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
    { hint: "run: npx --no-install kv-nixl install", details: { attempts } },
  );
}
