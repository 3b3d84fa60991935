import type { ConnectorModule } from "@kv/interface";
import { type ConnectorChoice, type ConnectorLoader, connectorRegistry } from "./registry.js";

/** The registry of this process, for programs that need but one. */
const shared = connectorRegistry();

/** Makes a connector known by name in this process. Errors: `KV_CONNECTOR_DUPLICATE`. */
export function registerConnector(name: string, loader: ConnectorLoader): void {
  shared.register(name, loader);
}

/** The connector that a configuration asks for. Errors: `KV_CONNECTOR_UNKNOWN`, `KV_CONNECTOR_LOAD_FAILED`. */
export function resolveConnector(config: ConnectorChoice): Promise<ConnectorModule> {
  return shared.resolve(config);
}
