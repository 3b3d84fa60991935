import { type ConnectorLoader, registerConnector } from "@kv/connector";
import type { ConnectorModule } from "@kv/interface";
import { createPullScheduler } from "./scheduler.js";
import { createPullWorker } from "./worker.js";

export { createPullScheduler, type PullScheduler } from "./scheduler.js";
export type { PullStepMetadata } from "./step-metadata.js";
export { createPullWorker } from "./worker.js";

/** The names of this connector in `kv_connector`: vLLM's and its own. */
export const PULL_CONNECTOR_NAMES = ["NixlConnector", "NixlPullConnector", "pull"] as const;

/** The connector in which D READs from P, as vLLM's `NixlPullConnector` does. */
export const pullConnector: ConnectorModule = {
  name: "NixlPullConnector",
  createScheduler: createPullScheduler,
  createWorker: createPullWorker,
};

export default pullConnector;

/**
 * Registers the connector under all of its names.
 * @throws `KV_CONNECTOR_DUPLICATE`.
 */
export function registerPullConnector(
  register: (name: string, loader: ConnectorLoader) => void = registerConnector,
): void {
  for (const name of PULL_CONNECTOR_NAMES) register(name, async () => pullConnector);
}
