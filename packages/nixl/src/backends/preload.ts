import { join } from "node:path";
import type { Environment } from "../library/find-library.js";
import { companionsOf, variablesFor } from "./plugin-dependencies.js";
import { describePlugins } from "./plugins.js";

export interface Preload {
  /** Paths, in the order in which they must be loaded. */
  readonly libraries: readonly string[];
  readonly variables: readonly (readonly [name: string, value: string])[];
}

const NOTHING: Preload = { libraries: [], variables: [] };

/**
 * What `kv-nixl install --with` has brought and the plugin of a backend does not find by itself. A library that the system has
 * is never replaced, unless the plugin asks for a newer version of it.
 */
export async function preloadFor(
  backend: string,
  libraryPath: string,
  environment: Environment,
): Promise<Preload> {
  const companions = await companionsOf(backend, environment);
  if (companions === undefined) return NOTHING;
  const [plugin] = await describePlugins({ libraryPath, environment, names: [backend] });
  if (plugin === undefined || !plugin.loads || plugin.supplied.length === 0) return NOTHING;
  return {
    libraries: plugin.supplied.map((name) => join(companions.folder, name)),
    variables: variablesFor(companions, plugin.supplied),
  };
}
