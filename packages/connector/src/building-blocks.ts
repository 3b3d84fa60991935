// Authors of connectors use these, as docs/how-to/add-a-connector.md shows.

export { delegateTo } from "./multi-connector.js";
export { HeartbeatSender } from "./peers/messages.js";
export {
  type ListPair,
  type OpenEngine,
  planPrefillEngine,
  type RefusedEngine,
  type RemoteEngine,
} from "./peers/remote-engine.js";
export { isRefused, RemoteEngines } from "./peers/remote-engines.js";
export { idleWithinGrace, TaskTracker, traced, transferAll } from "./peers/transfers.js";
export {
  ExpiringSet,
  engineKey,
  Generations,
  type RemoteRequest,
  rankKey,
  ranksToAsk,
  readRemoteRequest,
} from "./requests/references.js";
export type {
  ConnectorStepMetadata,
  LeaseOrder,
  SendableRequest,
} from "./requests/step-metadata.js";
export { ConnectorScheduler } from "./scheduler/connector-scheduler.js";
export type { DecodeOrders, FetchOrder } from "./scheduler/decode-requests.js";
export {
  createConnectorWorker,
  type WorkerContext,
  type WorkerHalf,
} from "./worker/connector-worker.js";
export { Leases, MessageGuard } from "./worker/leases.js";
export { type PendingReceive, PendingReceives, ReceiveError } from "./worker/pending-receives.js";
