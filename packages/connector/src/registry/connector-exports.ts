import { type ConnectorModule, KvError } from "@kv/interface";

const MEMBERS = ["name", "createScheduler", "createWorker"] as const;

/**
 * The connector among what a module exports: under the connector's name, else by default, else the module itself. Errors:
 * `KV_CONNECTOR_LOAD_FAILED` naming what is exported, and what is missing where one of them comes near.
 */
export function connectorIn(loaded: unknown, name: string, from: string): ConnectorModule {
  const exported = isObject(loaded) ? loaded : {};
  const candidates = [exported[name], exported["default"], loaded];
  const found = candidates.find((candidate) => missing(candidate).length === 0);
  if (found !== undefined) return found as ConnectorModule;
  const nearest = candidates.filter(isObject).find((candidate) => missing(candidate).length < MEMBERS.length);
  const lacking = nearest === undefined ? "" : `; the nearest one lacks ${missing(nearest).join(", ")}`;
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
  return MEMBERS.filter((member) => typeof candidate[member] !== (member === "name" ? "string" : "function"));
}

const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null;
