import { type ConnectorModule, KvError, type KvTransferConfig } from "@kv/interface";
import { connectorIn, importFrom } from "./load-connector.js";

/**
 * Loads a connector at its first use, usually `() => import("my-connector")`. The `ConnectorModule`
 * is what it resolves to, that value's export with the connector's name, or its default export.
 */
export type ConnectorLoader = () => Promise<unknown>;

/** The part of a configuration that selects a connector. */
export type ConnectorChoice = Pick<KvTransferConfig, "connector" | "modulePath">;

/** Connectors by name. */
export interface ConnectorRegistry {
  /**
   * Registers a connector by name.
   * @throws `KV_CONNECTOR_DUPLICATE`.
   */
  register(name: string, loader: ConnectorLoader): void;
  /**
   * The connector that the configuration selects: by `kv_connector_module_path` where it is set, as
   * in vLLM, otherwise by name.
   * @throws `KV_CONNECTOR_UNKNOWN` with the names that are known, `KV_CONNECTOR_LOAD_FAILED` with
   * the cause.
   */
  resolve(config: ConnectorChoice): Promise<ConnectorModule>;
  /** The registered names, in order of registration. */
  names(): readonly string[];
}

/** Options of `connectorRegistry`. */
export interface ConnectorRegistryOptions {
  /**
   * Base directory for packages and relative paths of `kv_connector_module_path`. @default the
   * working directory
   */
  readonly directory?: string | undefined;
  /** Imports a module path. @default `import` from `directory` */
  readonly importModule?: ((specifier: string) => Promise<unknown>) | undefined;
}

/**
 * Creates an empty registry, for programs that do not use the registry of the process. Throws
 * nothing.
 */
export function connectorRegistry(options: ConnectorRegistryOptions = {}): ConnectorRegistry {
  const directory = () => options.directory ?? process.cwd();
  const importModule =
    options.importModule ?? ((specifier: string) => importFrom(specifier, directory()));
  const loaders = new Map<string, ConnectorLoader>();

  async function load(
    name: string,
    from: string,
    loader: ConnectorLoader,
  ): Promise<ConnectorModule> {
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
        throw new KvError(
          "KV_CONNECTOR_DUPLICATE",
          `a connector named ${name} is registered already`,
          {
            hint: "choose another name, or load yours by kv_connector_module_path",
          },
        );
      }
      loaders.set(name, loader);
    },
    async resolve({ connector, modulePath }) {
      if (modulePath !== undefined)
        return load(connector, modulePath, () => importModule(modulePath));
      const loader = loaders.get(connector);
      if (loader !== undefined) return load(connector, `the registration of ${connector}`, loader);
      const known = [...loaders.keys()];
      throw new KvError(
        "KV_CONNECTOR_UNKNOWN",
        `no connector ${connector}; known are ${known.join(", ") || "none"}`,
        {
          hint: "register it with registerConnector(name, loader), or set kv_connector_module_path",
          details: { connector, known },
        },
      );
    },
    names: () => [...loaders.keys()],
  };
}

/** The registry of this process, for programs that need only one. */
const shared = connectorRegistry();

/**
 * Registers a connector by name in this process.
 * @throws `KV_CONNECTOR_DUPLICATE`.
 */
export function registerConnector(name: string, loader: ConnectorLoader): void {
  shared.register(name, loader);
}

/**
 * The connector that a configuration asks for.
 * @throws `KV_CONNECTOR_UNKNOWN`, `KV_CONNECTOR_LOAD_FAILED`.
 */
export function resolveConnector(config: ConnectorChoice): Promise<ConnectorModule> {
  return shared.resolve(config);
}
