import { readdir } from "node:fs/promises";
import { dirname, join } from "node:path";
import { type Environment, realLibrary } from "../library/find-library.js";
import { type MissingPart, missingParts, nameOfMissing } from "../library/missing-parts.js";
import { howToReinstall } from "../library/reinstall-hint.js";
import { companionsOf } from "./plugin-dependencies.js";

/** A plugin of NIXL, as the loader sees it; nothing of it has run. */
export interface PluginDescription {
  /** As NIXL names the backend, such as "UCX". */
  readonly name: string;
  readonly file: string;
  readonly loads: boolean;
  /** Empty when it loads. */
  readonly missing: readonly MissingPart[];
  /** Libraries that it finds only in what `kv-nixl install --with` has brought: file names. */
  readonly supplied: readonly string[];
  /** What would help; undefined when it loads. */
  readonly remedy: string | undefined;
}

export interface DescribePluginsOptions {
  /** Path of `libnixl_capi.so`: the plugins lie beside it, or in `NIXL_PLUGIN_DIR`. */
  libraryPath: string;
  environment?: Environment;
  /** Only these. */
  names?: readonly string[];
}

/** The folder in which NIXL looks for plugins: `NIXL_PLUGIN_DIR`, else `plugins` beside the library, links followed. */
export function pluginFolder(libraryPath: string, environment: Environment = process.env): string {
  return environment.NIXL_PLUGIN_DIR || join(dirname(realLibrary(libraryPath)), "plugins");
}

/** Every plugin found, in order of name: whether it loads, and all that it lacks. About 30 ms for each. */
export async function describePlugins(options: DescribePluginsOptions): Promise<PluginDescription[]> {
  const { libraryPath, environment = process.env, names } = options;
  const folder = pluginFolder(libraryPath, environment);
  const found = (await readdir(folder).catch(() => [] as string[]))
    .map((file) => /^libplugin_(.+)\.so$/.exec(file)?.[1])
    .filter((name): name is string => name !== undefined && (names?.includes(name) ?? true))
    .sort();
  const described: PluginDescription[] = [];
  // One after another: each is a process.
  const again = howToReinstall(libraryPath, environment);
  for (const name of found)
    described.push(await describe(name, join(folder, `libplugin_${name}.so`), environment, again));
  return described;
}

async function describe(
  name: string,
  file: string,
  environment: Environment,
  again: string,
): Promise<PluginDescription> {
  const alone = await missingParts(file, { environment });
  if (alone.length === 0) return { name, file, loads: true, missing: [], supplied: [], remedy: undefined };
  const companions = await companionsOf(name, environment);
  const missing =
    companions === undefined
      ? alone
      : await missingParts(file, { environment, folders: [companions.folder] });
  if (missing.length > 0) {
    return {
      name,
      file,
      loads: false,
      missing,
      supplied: [],
      remedy: remedyFor(name, missing, { installed: companions !== undefined, again }),
    };
  }
  const supplied = [...new Set(alone.flatMap(libraryOf))].sort();
  return { name, file, loads: true, missing, supplied, remedy: undefined };
}

function libraryOf(part: MissingPart): string[] {
  if (part.kind === "library") return [part.name];
  return part.kind === "version" ? [part.library] : [];
}

/** Names of the wheel's own libraries: its builder puts a digest into those that it takes along. */
const OF_THE_WHEEL = /-[0-9a-f]{8}\.so|^libnixl/;

/** What helps where a library of NIXL's lacks these; `again` says how to install NIXL again. */
export function remedyFor(
  name: string,
  missing: readonly MissingPart[],
  { installed, again }: { installed: boolean; again: string },
): string {
  if (missing.flatMap(libraryOf).some((library) => OF_THE_WHEEL.test(library))) return again;
  const version = missing.find((part) => part.kind === "version");
  if (version !== undefined) {
    return `a newer ${version.library}, or the NIXL that is known to work with it: npx --no-install kv-nixl install`;
  }
  if (name === "LIBFABRIC" && !installed) return "npx --no-install kv-nixl install --with libfabric";
  const libraries = missing.flatMap(libraryOf);
  if (libraries.length === 0) return again;
  const cuda = libraries.every((library) => /^libcu/.test(library));
  const what = cuda ? "CUDA's driver and runtime" : "the system's packages";
  return `${libraries.join(", ")}: install ${what}, or put their folder into LD_LIBRARY_PATH`;
}

/** One line on a plugin, for an error or a report. */
export function summaryOf(plugin: PluginDescription): string {
  if (plugin.loads) return `${plugin.name} (loads)`;
  const [first, ...rest] = plugin.missing.map(nameOfMissing);
  const more = rest.length > 3 ? [...rest.slice(0, 3), `${rest.length - 3} more`] : rest;
  return `${plugin.name} (lacks ${[first, ...more].join(", ")})`;
}
