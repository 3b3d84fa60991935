import { isAbsolute, resolve as resolvePath } from "node:path";
import { pathToFileURL } from "node:url";
import { type ConnectorModule, KvError, type KvTransferConfig } from "@kv/interface";
import { resolve } from "import-meta-resolve";

/**
 * Loads a connector at first use, usually `() => import("my-connector")`. The result is a
 * `ConnectorModule`, or exports one under the connector's name or as default.
 */
export type ConnectorLoader = () => Promise<unknown>;

/** The part of a configuration that selects a connector. */
export type ConnectorChoice = Pick<KvTransferConfig, "connector" | "modulePath">;

/** Connectors by name. */
export interface ConnectorRegistry {
  /** @throws `KV_CONNECTOR_DUPLICATE`. */
  register(name: string, loader: ConnectorLoader): void;
  /**
   * Selects by `kv_connector_module_path` where set, as vLLM does, otherwise by name.
   * @throws `KV_CONNECTOR_UNKNOWN` with the names that are known, `KV_CONNECTOR_LOAD_FAILED` with
   * the cause.
   */
  resolve(config: ConnectorChoice): Promise<ConnectorModule>;
  names(): readonly string[];
}

/** Options of `connectorRegistry`. */
export interface ConnectorRegistryOptions {
  /**
   * Base of packages and relative paths in `kv_connector_module_path`. @default the working
   * directory
   */
  readonly directory?: string | undefined;
  /** Imports a module path. @default `import` from `directory` */
  readonly importModule?: ((specifier: string) => Promise<unknown>) | undefined;
}

/** Creates an empty registry, separate from the process's. Throws nothing. */
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

/**
 * Imports as code in `directory` would: `import()` here would not find an application's packages.
 * Accepts absolute paths on every system.
 * @throws The errors of resolving and importing.
 */
export async function importFrom(specifier: string, directory: string): Promise<unknown> {
  if (isAbsolute(specifier)) return import(pathToFileURL(specifier).href);
  const parent = pathToFileURL(resolvePath(directory, "noname.js")).href;
  return import(resolve(specifier, parent));
}

const MEMBERS = ["name", "createScheduler", "createWorker"] as const;

/**
 * Looks for the connector's name, the default export, then the module itself.
 * @throws `KV_CONNECTOR_LOAD_FAILED` naming the exports, and what the nearest one lacks.
 */
function connectorIn(loaded: unknown, name: string, from: string): ConnectorModule {
  const exported = isObject(loaded) ? loaded : {};
  const candidates = [exported[name], exported["default"], loaded];
  const found = candidates.find((candidate) => missing(candidate).length === 0);
  if (found !== undefined) return found as ConnectorModule;
  const nearest = candidates
    .filter(isObject)
    .find((candidate) => missing(candidate).length < MEMBERS.length);
  const lacking =
    nearest === undefined ? "" : `; the nearest one lacks ${missing(nearest).join(", ")}`;
  throw new KvError(
    "KV_CONNECTOR_LOAD_FAILED",
    `${from} exports no connector, neither as ${name} nor by default${lacking}`,
    {
      hint: "export an object with name, createScheduler and createWorker (ConnectorModule of @kv/interface)",
      details: { exports: Object.keys(exported) },
    },
  );
}

function missing(candidate: unknown): readonly string[] {
  if (!isObject(candidate)) return MEMBERS;
  return MEMBERS.filter(
    (member) => typeof candidate[member] !== (member === "name" ? "string" : "function"),
  );
}

const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null;
