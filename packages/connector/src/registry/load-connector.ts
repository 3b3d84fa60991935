import { isAbsolute, resolve as resolvePath } from "node:path";
import { pathToFileURL } from "node:url";
import { type ConnectorModule, KvError } from "@kv/interface";
import { resolve } from "import-meta-resolve";

/**
 * Imports a module in the way that code in `directory` would. `import()` itself resolves from the
 * file that contains it, where an application's packages are not installed. Accepts what `import`
 * accepts, and absolute paths on every system.
 * @throws The errors of resolving and importing.
 */
export async function importFrom(specifier: string, directory: string): Promise<unknown> {
  if (isAbsolute(specifier)) return import(pathToFileURL(specifier).href);
  const parent = pathToFileURL(resolvePath(directory, "noname.js")).href;
  return import(resolve(specifier, parent));
}

const MEMBERS = ["name", "createScheduler", "createWorker"] as const;

/**
 * Returns the connector that a module exports: under the connector's name, as the default export,
 * or as the module itself.
 * @throws `KV_CONNECTOR_LOAD_FAILED` naming the exports, and what the most similar export lacks.
 */
export function connectorIn(loaded: unknown, name: string, from: string): ConnectorModule {
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
