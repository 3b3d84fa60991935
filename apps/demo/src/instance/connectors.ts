import { type ConnectorRegistry, connectorRegistry } from "@kv/connector";
import { registerPullConnector } from "@kv/pull";

/** Connectors that the demo knows by name; any other comes by `kv_connector_module_path`. */
export function demoConnectors(): ConnectorRegistry {
  const registry = connectorRegistry();
  registerPullConnector((name, loader) => registry.register(name, loader));
  return registry;
}
