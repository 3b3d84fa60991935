import { createConnectorWorker } from "@kv/connector/building-blocks";
import type { WorkerConnector, WorkerOptions } from "@kv/interface";
import { REQUEST_CONTROL } from "@kv/protocol";
import { DecodeWorker } from "./decode-worker.js";
import { PrefillWorker } from "./prefill-worker.js";
import { PULL, type PullStepMetadata } from "./step-metadata.js";

/**
 * Creates the worker side of pull, for one rank: P's and D's half around one agent.
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
