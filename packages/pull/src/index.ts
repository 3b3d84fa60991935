import { type ConnectorLoader, registerConnector } from "@kv/connector";
import type { ConnectorModule } from "@kv/interface";
import { createPullScheduler } from "./pull-scheduler.js";
import { createPullWorker } from "./pull-worker.js";

export { createPullScheduler, type PullScheduler } from "./pull-scheduler.js";
export { createPullWorker } from "./pull-worker.js";
export type { PullStepMetadata } from "./step-metadata.js";

/** The names under which vLLM knows this connector, and its own. */
export const PULL_CONNECTOR_NAMES = ["NixlConnector", "NixlPullConnector", "pull"] as const;

/** D READs from P, as vLLM's `NixlPullConnector`. */
export const pullConnector: ConnectorModule = {
  name: "NixlPullConnector",
  createScheduler: createPullScheduler,
  createWorker: createPullWorker,
};

export default pullConnector;

/** Makes the connector known under all of its names. Errors: `KV_CONNECTOR_DUPLICATE`. */
export function registerPullConnector(
  register: (name: string, loader: ConnectorLoader) => void = registerConnector,
): void {
  for (const name of PULL_CONNECTOR_NAMES) register(name, async () => pullConnector);
}
