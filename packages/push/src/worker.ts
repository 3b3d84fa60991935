import { createWorkerShell } from "@kv/connector";
import type { WorkerConnector, WorkerOptions } from "@kv/interface";
import { PUSH_CONTROL } from "@kv/protocol";
import { PUSH } from "./step-metadata.js";
import { createWorkerParts } from "./worker-parts.js";

/** The worker side of push, of one rank: both halves around one agent. */
export function createPushWorker(options: WorkerOptions): WorkerConnector {
  return createWorkerShell(options, {
    name: PUSH,
    transferMode: "push",
    operation: "write",
    features: [PUSH_CONTROL],
    createHalves: createWorkerParts,
  });
}
