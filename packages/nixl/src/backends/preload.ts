import { join } from "node:path";
import type { Environment } from "../environment.js";
import { dependencyFolder, describePlugins, pluginFolder, variablesFor } from "./plugins.js";

/** The libraries and variables that a backend's plugin needs before NIXL loads it. */
export interface Preload {
  /** Paths of libraries, in the order in which they must be loaded. */
  readonly libraries: readonly string[];
  /** Variables to set, where they are not set. */
  readonly variables: readonly (readonly [name: string, value: string])[];
}

const NOTHING: Preload = { libraries: [], variables: [] };

/**
 * Finds the libraries that `kv-nixl install --with` installed and that a backend's plugin does not
 * find by itself. A library of the system is never replaced, unless the plugin needs a newer
 * version of it. To ask the loader takes about 60 ms, so results are remembered, for as long as the
 * plugin's folder and the folder of the libraries stay the same, and until `forget`.
 */
export class PreloadFinder {
  readonly #found = new Map<string, Promise<Preload>>();

  /**
   * The preload of a backend. Empty when nothing is installed for it, when its plugin loads without
   * it, or when the plugin does not load even with it.
   */
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

  /**
   * Asks the loader again next time. Call it when an agent did not start with the libraries that
   * were found.
   */
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
