// The contract for authors of connectors, of which pull and push consist too. Import it from
// "@kv/connector/building-blocks"; docs/how-to/add-a-connector.md uses it.

// Wrap a connector.
export { delegateTo } from "./multi-connector.js";
// Other engines.
export { idleWithinGrace, TaskTracker, traced } from "./peers/background-work.js";
export { HeartbeatSender } from "./peers/messages.js";
export {
  type ListPair,
  type OpenEngine,
  planPrefillEngine,
  type RemoteEngine,
} from "./peers/remote-engine.js";
export { RemoteEngines } from "./peers/remote-engines.js";
export { transferAll } from "./peers/transfers.js";
// The scheduler side.
export { ExpiringSet, Generations } from "./requests/references.js";
export {
  engineKey,
  type RemoteRequest,
  rankKey,
  readRemoteRequest,
} from "./requests/remote-request.js";
export type {
  ConnectorStepMetadata,
  LeaseOrder,
  SendableRequest,
} from "./requests/step-metadata.js";
export { ConnectorScheduler } from "./scheduler/connector-scheduler.js";
export type { DecodeOrders, FetchOrder } from "./scheduler/decode-requests.js";
// The worker side.
export {
  createConnectorWorker,
  type WorkerContext,
  type WorkerHalf,
} from "./worker/connector-worker.js";
export { Leases, MessageGuard } from "./worker/leases.js";
export { type PendingReceive, PendingReceives } from "./worker/pending-receives.js";
export { ReceiveError } from "./worker/receive-error.js";
