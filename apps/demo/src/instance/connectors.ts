import {
  type ConnectorRegistry,
  connectorRegistry,
  dualConnector,
  multiConnectorOf,
  type registerConnector,
} from "@kv/connector";
import { pullConnector, registerPullConnector } from "@kv/pull";
import { pushConnector, registerPushConnector } from "@kv/push";

/**
 * A prompt whose parameters name neither takes pull or push by its request id, so that a run shows
 * both.
 */
const autoConnector = dualConnector({
  name: "auto",
  pull: pullConnector,
  push: pushConnector,
  prefer: ({ requestId }) => (requestId.charCodeAt(requestId.length - 1) % 2 ? "push" : "pull"),
});

/**
 * The connectors that the demo knows by name. Others are loaded from `kv_connector_module_path`.
 */
export function demoConnectors(): ConnectorRegistry {
  const registry = connectorRegistry();
  const register: typeof registerConnector = (name, loader) => registry.register(name, loader);
  registerPullConnector(register);
  registerPushConnector(register);
  register("auto", async () => autoConnector);
  register("MultiConnector", async () => multiConnectorOf(registry.resolve));
  return registry;
}
