import { type ConnectorLoader, registerConnector } from "@kv/connector";
import type { ConnectorModule } from "@kv/interface";
import { createPushScheduler } from "./scheduler.js";
import { createPushWorker } from "./worker.js";

export { createPushScheduler, type PushScheduler } from "./scheduler.js";
export type { PushStepMetadata, RegistrationOrder } from "./step-metadata.js";
export { createPushWorker } from "./worker.js";

/** The names of this connector in `kv_connector`: vLLM's and its own. */
export const PUSH_CONNECTOR_NAMES = ["NixlPushConnector", "push"] as const;

/** The connector in which P WRITEs into D, as vLLM's `NixlPushConnector` does. */
export const pushConnector: ConnectorModule = {
  name: "NixlPushConnector",
  createScheduler: createPushScheduler,
  createWorker: createPushWorker,
};

export default pushConnector;

/**
 * Registers the connector under all of its names.
 * @throws `KV_CONNECTOR_DUPLICATE`.
 */
export function registerPushConnector(
  register: (name: string, loader: ConnectorLoader) => void = registerConnector,
): void {
  for (const name of PUSH_CONNECTOR_NAMES) register(name, async () => pushConnector);
}
