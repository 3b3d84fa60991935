import { readdir } from "node:fs/promises";
import { dirname, join } from "node:path";
import type { Environment } from "../environment.js";
import { realLibrary } from "../library/cache-folder.js";
import { libraryPackage, reinstallHint } from "../library/library-package.js";
import { type MissingPart, missingParts, nameOfMissing } from "../library/missing-parts.js";

/** A plugin of NIXL as the loader sees it. None of its code has run. */
export interface PluginDescription {
  /** NIXL's name for the backend, such as "UCX". */
  readonly name: string;
  readonly file: string;
  readonly loads: boolean;
  /** What the loader does not find; empty when it loads. */
  readonly missing: readonly MissingPart[];
  /** File names of the libraries that only the optional package `@kv/nixl-libs-…` supplies. */
  readonly supplied: readonly string[];
  /** A command or an instruction that helps; undefined when it loads. */
  readonly remedy: string | undefined;
}

/** Which plugins to describe. */
export interface DescribePluginsOptions {
  /** Path of `libnixl_capi.so`. Plugins lie beside it, or in `NIXL_PLUGIN_DIR`. */
  readonly libraryPath: string;
  /** The variables to read. @default process.env */
  readonly environment?: Environment | undefined;
  /** Describe only these backends. @default all */
  readonly names?: readonly string[] | undefined;
}

/** NIXL looks in `NIXL_PLUGIN_DIR`, else in `plugins` beside the real file of the library. */
export function pluginFolder(libraryPath: string, environment: Environment = process.env): string {
  return environment.NIXL_PLUGIN_DIR || join(dirname(realLibrary(libraryPath)), "plugins");
}

/** Describes every plugin in NIXL's folder, by name. Each takes about 30 ms. */
export async function describePlugins(
  options: DescribePluginsOptions,
): Promise<PluginDescription[]> {
  const { libraryPath, environment = process.env, names } = options;
  const folder = pluginFolder(libraryPath, environment);
  const reinstall = reinstallHint(libraryPath, environment);
  const found = (await readdir(folder).catch(() => [] as string[]))
    .map((file) => /^libplugin_(.+)\.so$/.exec(file)?.[1])
    .filter((name): name is string => name !== undefined && (names?.includes(name) ?? true))
    .sort();
  const described: PluginDescription[] = [];
  // One after another: each starts a process.
  for (const name of found) {
    described.push(
      await describe(name, join(folder, `libplugin_${name}.so`), environment, reinstall),
    );
  }
  return described;
}

async function describe(
  name: string,
  file: string,
  environment: Environment,
  reinstall: string,
): Promise<PluginDescription> {
  const missingFromSystem = await missingParts(file, { environment });
  const whole = { name, file, loads: true, missing: [], supplied: [], remedy: undefined };
  if (missingFromSystem.length === 0) return whole;
  const folder = await dependencyFolder(name);
  const missing =
    folder === undefined
      ? missingFromSystem
      : await missingParts(file, { environment, folders: [folder] });
  if (missing.length > 0) {
    const remedy = remedyFor(name, missing, { hasDependencies: folder !== undefined, reinstall });
    return { ...whole, loads: false, missing, remedy };
  }
  return { ...whole, supplied: librariesOf(missingFromSystem).sort() };
}

function librariesOf(missing: readonly MissingPart[]): string[] {
  const names = missing.flatMap((part) => {
    if (part.kind === "library") return [part.name];
    return part.kind === "version" ? [part.library] : [];
  });
  return [...new Set(names)];
}

/** The wheel's build tool puts a digest into the names of the libraries that it bundles. */
const OF_THE_WHEEL = /-[0-9a-f]{8}\.so|^libnixl/;

/** NIXL's core is linked to OpenSSL 3 through gRPC. */
const OPENSSL = /^lib(ssl|crypto)\.so\./;
const OPENSSL_REMEDY =
  "install OpenSSL 3: apt-get install libssl3 (Debian 12, Ubuntu 22.04, or later), dnf install openssl-libs (RHEL 9, Fedora, Amazon Linux 2023), dnf install openssl3-libs (RHEL 8 with EPEL); Debian 11 has none: use a newer image, such as node:22-bookworm";

/**
 * What to do when a plugin or NIXL's library lacks these parts. `reinstall` tells how to install
 * NIXL again; `hasDependencies` means that the optional package `@kv/nixl-libs-…` is installed.
 */
export function remedyFor(
  name: string,
  missing: readonly MissingPart[],
  { hasDependencies, reinstall }: { hasDependencies: boolean; reinstall: string },
): string {
  const libraries = librariesOf(missing);
  if (libraries.some((library) => OF_THE_WHEEL.test(library))) return reinstall;
  if (libraries.some((library) => OPENSSL.test(library))) return OPENSSL_REMEDY;
  const version = missing.find((part) => part.kind === "version");
  if (version?.name.startsWith("GLIBC_")) {
    return `a system with ${version.name.replace("_", " ").toLowerCase()} or newer; NIXL's own wheels need glibc 2.28`;
  }
  if (version !== undefined) {
    return `a newer ${version.library}, or the NIXL that is known to work with it: npx --no-install kv-nixl install`;
  }
  if (name === "LIBFABRIC" && !hasDependencies) return `npm install ${libraryPackage().name}`;
  if (libraries.length === 0) return reinstall;
  const cuda = libraries.every((library) => /^libcu/.test(library));
  const packages = cuda ? "CUDA's driver and runtime" : "the system's packages";
  return `${libraries.join(", ")}: install ${packages}, or add their folder to LD_LIBRARY_PATH`;
}

/** One line about a plugin, such as "UCX (loads)" or "GDS (lacks libcufile.so.0)". */
export function summaryOf(plugin: PluginDescription): string {
  if (plugin.loads) return `${plugin.name} (loads)`;
  const [first, ...rest] = plugin.missing.map(nameOfMissing);
  const more = rest.length > 3 ? [...rest.slice(0, 3), `${rest.length - 3} more`] : rest;
  return `${plugin.name} (lacks ${[first, ...more].join(", ")})`;
}

/** The optional package's folder of libraries that LIBFABRIC needs from outside the wheel. */
async function dependencyFolder(backend: string): Promise<string | undefined> {
  const { folder } = libraryPackage();
  if (backend !== "LIBFABRIC" || folder === undefined) return undefined;
  const names = await readdir(folder).catch(() => [] as string[]);
  const found = names.find((name) => name.startsWith("libfabric-"));
  return found && join(folder, found);
}

export interface Preload {
  /** Paths in loading order. */
  readonly libraries: readonly string[];
  /** Variables to set where they are unset. */
  readonly variables: readonly (readonly [name: string, value: string])[];
}

const NOTHING: Preload = { libraries: [], variables: [] };

/**
 * Finds the libraries of the optional package that a plugin does not find by itself. A library of
 * the system stays unless the plugin needs a newer one. Asking the loader takes about 60 ms, so
 * results are kept until `forget`.
 */
export class PreloadFinder {
  readonly #found = new Map<string, Promise<Preload>>();

  /** Empty unless the plugin loads only with what is installed for it. */
  async find(backend: string, libraryPath: string, environment: Environment): Promise<Preload> {
    const folder = await dependencyFolder(backend);
    if (folder === undefined) return NOTHING;
    const key = [backend, pluginFolder(libraryPath, environment), folder].join("\n");
    const found = this.#found.get(key) ?? findIn(folder, backend, libraryPath, environment);
    this.#found.set(key, found);
    try {
      return await found;
    } catch (error) {
      this.#found.delete(key);
      throw error;
    }
  }

  /** Call it when an agent did not start with these libraries. */
  forget(): void {
    this.#found.clear();
  }
}

async function findIn(
  folder: string,
  backend: string,
  libraryPath: string,
  environment: Environment,
): Promise<Preload> {
  const [plugin] = await describePlugins({ libraryPath, environment, names: [backend] });
  if (plugin === undefined || !plugin.loads || plugin.supplied.length === 0) return NOTHING;
  return {
    libraries: plugin.supplied.map((name) => join(folder, name)),
    // Providers of the system's libfabric must not be loaded.
    variables: plugin.supplied.includes("libfabric.so.1") ? [["FI_PROVIDER_PATH", folder]] : [],
  };
}
