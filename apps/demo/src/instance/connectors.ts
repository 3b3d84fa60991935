import {
  type ConnectorRegistry,
  connectorRegistry,
  dualConnector,
  type registerConnector,
} from "@kv/connector";
import { pullConnector, registerPullConnector } from "@kv/pull";
import { pushConnector, registerPushConnector } from "@kv/push";

/** Both kinds of pair in one deployment; prompts that do not say how take turns, so that a run of the demo shows both. */
const autoConnector = dualConnector({
  name: "auto",
  pull: pullConnector,
  push: pushConnector,
  prefer: ({ requestId }) => (sumOf(requestId) % 2 === 0 ? "pull" : "push"),
});

/** Connectors that the demo knows by name; any other comes by `kv_connector_module_path`. */
export function demoConnectors(): ConnectorRegistry {
  const registry = connectorRegistry();
  const register: typeof registerConnector = (name, loader) => registry.register(name, loader);
  registerPullConnector(register);
  registerPushConnector(register);
  register("auto", async () => autoConnector);
  return registry;
}

function sumOf(text: string): number {
  let sum = 0;
  for (let i = 0; i < text.length; i++) sum += text.charCodeAt(i);
  return sum;
}
