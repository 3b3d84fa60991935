import { createConnectorWorker } from "@kv/connector/building-blocks";
import type { WorkerConnector, WorkerOptions } from "@kv/interface";
import { PUSH_CONTROL, REQUEST_CONTROL } from "@kv/protocol";
import { DecodeWorker } from "./decode-worker.js";
import { PrefillWorker } from "./prefill-worker.js";
import { PUSH, type PushStepMetadata } from "./step-metadata.js";

/**
 * Creates the worker side of push, for one rank: P's and D's half around one agent.
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
