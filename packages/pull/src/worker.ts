import { createWorkerShell } from "@kv/connector";
import type { WorkerConnector, WorkerOptions } from "@kv/interface";
import { PULL } from "./step-metadata.js";
import { createWorkerParts } from "./worker-parts.js";

/** The worker side of pull, of one rank: both halves around one agent. */
export function createPullWorker(options: WorkerOptions): WorkerConnector {
  return createWorkerShell(options, {
    name: PULL,
    transferMode: "pull",
    operation: "read",
    createHalves: createWorkerParts,
  });
}
