import { type ConnectorModule, KvError, type KvTransferConfig } from "@kv/interface";
import { connectorIn } from "./connector-exports.js";
import { importFrom } from "./import-from.js";

/**
 * Brings a connector in, when it is first asked for: `() => import("my-connector")`, usually. What it resolves to, or its export of the
 * connector's name, or its default export is the `ConnectorModule`.
 */
export type ConnectorLoader = () => Promise<unknown>;

export type ConnectorChoice = Pick<KvTransferConfig, "connector" | "modulePath">;

export interface ConnectorRegistry {
  /** Makes a connector known by name. Errors: `KV_CONNECTOR_DUPLICATE`. */
  register(name: string, loader: ConnectorLoader): void;
  /**
   * The connector that the configuration asks for: by `kv_connector_module_path` where there is one, as in vLLM, else by name.
   * Errors: `KV_CONNECTOR_UNKNOWN` with the names that are known, `KV_CONNECTOR_LOAD_FAILED` with the cause.
   */
  resolve(config: ConnectorChoice): Promise<ConnectorModule>;
  names(): readonly string[];
}

export interface ConnectorRegistryOptions {
  /** Where packages and relative paths of `kv_connector_module_path` are looked for; the working directory by default. */
  readonly directory?: string;
  /** How a module path is imported. */
  readonly importModule?: (specifier: string) => Promise<unknown>;
}

export function connectorRegistry(options: ConnectorRegistryOptions = {}): ConnectorRegistry {
  const directory = () => options.directory ?? process.cwd();
  const importModule = options.importModule ?? ((specifier: string) => importFrom(specifier, directory()));
  const loaders = new Map<string, ConnectorLoader>();

  async function load(name: string, from: string, loader: ConnectorLoader): Promise<ConnectorModule> {
    let loaded: unknown;
    try {
      loaded = await loader();
    } catch (error) {
      if (KvError.is(error, "KV_CONNECTOR_LOAD_FAILED")) throw error;
      throw new KvError(
        "KV_CONNECTOR_LOAD_FAILED",
        `connector ${name} could not be loaded from ${from}: ${error instanceof Error ? error.message : String(error)}`,
        {
          cause: error,
          hint: `kv_connector_module_path takes a package installed in ${directory()}, a path or a file: URL`,
        },
      );
    }
    return connectorIn(loaded, name, from);
  }

  return {
    register(name, loader) {
      if (loaders.has(name)) {
        throw new KvError("KV_CONNECTOR_DUPLICATE", `a connector named ${name} is registered already`, {
          hint: "choose another name, or load yours by kv_connector_module_path",
        });
      }
      loaders.set(name, loader);
    },
    async resolve({ connector, modulePath }) {
      if (modulePath !== undefined) return load(connector, modulePath, () => importModule(modulePath));
      const loader = loaders.get(connector);
      if (loader !== undefined) return load(connector, `the registration of ${connector}`, loader);
      const known = [...loaders.keys()];
      throw new KvError(
        "KV_CONNECTOR_UNKNOWN",
        `no connector ${connector}; known are ${known.join(", ") || "none"}`,
        {
          hint: "registerConnector(name, loader) makes one known; kv_connector_module_path names a module",
          details: { connector, known },
        },
      );
    },
    names: () => [...loaders.keys()],
  };
}
