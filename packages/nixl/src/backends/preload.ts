import { join } from "node:path";
import type { Environment } from "../environment.js";
import { dependencyFolder, describePlugins, pluginFolder, variablesFor } from "./plugins.js";

export interface Preload {
  /** Paths in loading order. */
  readonly libraries: readonly string[];
  /** Variables to set where they are unset. */
  readonly variables: readonly (readonly [name: string, value: string])[];
}

const NOTHING: Preload = { libraries: [], variables: [] };

/**
 * Finds the libraries of `kv-nixl install --with` that a plugin does not find by itself. A library
 * of the system stays unless the plugin needs a newer one. Asking the loader takes about 60 ms, so
 * results are kept until `forget`.
 */
export class PreloadFinder {
  readonly #found = new Map<string, Promise<Preload>>();

  /** Empty unless the plugin loads only with what is installed for it. */
  async find(backend: string, libraryPath: string, environment: Environment): Promise<Preload> {
    const folder = await dependencyFolder(backend, environment);
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
    variables: variablesFor(folder, plugin.supplied),
  };
}
