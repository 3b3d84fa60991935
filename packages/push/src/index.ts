import { type ConnectorLoader, registerConnector } from "@kv/connector";
import { createConnectorWorker } from "@kv/connector/building-blocks";
import type { ConnectorModule, WorkerConnector, WorkerOptions } from "@kv/interface";
import { PUSH_CONTROL, REQUEST_CONTROL } from "@kv/protocol";
import { DecodeWorker } from "./decode-worker.js";
import { PrefillWorker } from "./prefill-worker.js";
import { createPushScheduler } from "./scheduler.js";
import { PUSH, type PushStepMetadata } from "./step-metadata.js";

export { createPushScheduler, type PushScheduler } from "./scheduler.js";
export type { PushStepMetadata, RegistrationOrder } from "./step-metadata.js";

/**
 * The worker side of push for one rank.
 * @throws `KV_TRANSPORT_UNSUPPORTED`, `KV_PLATFORM_UNSUPPORTED`, `KV_CONFIG_INVALID`.
 */
export function createPushWorker(options: WorkerOptions): WorkerConnector & AsyncDisposable {
  return createConnectorWorker<PushStepMetadata>(options, {
    name: PUSH,
    transferMode: "push",
    operation: "write",
    features: [PUSH_CONTROL, REQUEST_CONTROL],
    lists: ["registrations", "withdrawals"],
    createHalves(context) {
      if (options.config.enablePermuteLocalKv) {
        const reason = "push always converts HND blocks of P for an NHD cache of D";
        context.log.warn("setting-not-used", {
          key: "enable_permute_local_kv",
          value: true,
          reason,
        });
      }
      return { prefill: new PrefillWorker(context), decode: new DecodeWorker(context) };
    },
  });
}

/** vLLM's names of this connector in `kv_connector`, and its own. */
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
