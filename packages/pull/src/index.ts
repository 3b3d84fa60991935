import { type ConnectorLoader, registerConnector } from "@kv/connector";
import { createConnectorWorker } from "@kv/connector/building-blocks";
import type { ConnectorModule, WorkerConnector, WorkerOptions } from "@kv/interface";
import { REQUEST_CONTROL } from "@kv/protocol";
import { DecodeWorker } from "./decode-worker.js";
import { PrefillWorker } from "./prefill-worker.js";
import { createPullScheduler } from "./scheduler.js";
import { PULL, type PullStepMetadata } from "./step-metadata.js";

export { createPullScheduler, type PullScheduler } from "./scheduler.js";
export type { PullStepMetadata } from "./step-metadata.js";

/**
 * The worker side of pull for one rank.
 * @throws `KV_TRANSPORT_UNSUPPORTED`, `KV_PLATFORM_UNSUPPORTED`, `KV_CONFIG_INVALID`.
 */
export function createPullWorker(options: WorkerOptions): WorkerConnector & AsyncDisposable {
  return createConnectorWorker<PullStepMetadata>(options, {
    name: PULL,
    transferMode: "pull",
    operation: "read",
    features: [REQUEST_CONTROL],
    lists: ["receives", "releases", "aborts"],
    createHalves: (context) => ({
      prefill: new PrefillWorker(context),
      decode: new DecodeWorker(context),
    }),
  });
}

/** vLLM's names of this connector in `kv_connector`, and its own. */
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
