// The parts of which pull and push consist, for authors of connectors. Import them from
// "@kv/connector/building-blocks".

export { type ConnectorSettings, connectorSettings } from "./config/connector-settings.js";
export { delegateTo } from "./delegate-to.js";
export { type ClockOffset, type ClockSample, clockOffset } from "./handshake/clock-offset.js";
export {
  ConnectorHandshake,
  type ConnectorHandshakeOptions,
  type RemoteRank,
  type RemoteRanks,
} from "./handshake/connector-handshake.js";
export {
  describeEngine,
  type EngineAddress,
  engineKey,
  type RankKey,
  rankKey,
} from "./handshake/engine-address.js";
export {
  describeRank,
  localGeometry,
  modelGeometry,
  type RankPlace,
  remoteGeometry,
} from "./handshake/rank-geometry.js";
export { TransferMetrics } from "./metrics/transfer-metrics.js";
export {
  type HeartbeatResult,
  HeartbeatSender,
  type HeartbeatSenderOptions,
  type HeartbeatTarget,
  NotificationSender,
} from "./peers/messages.js";
export { isPeerLost, unreachablePeer } from "./peers/peer-errors.js";
export {
  type EnginePlan,
  type EngineReference,
  type EngineRequest,
  type ListPair,
  type ListTables,
  type OpenEngine,
  type PrefillPlanOptions,
  planPrefillEngine,
  type RemoteEngine,
  type RemoteEngineSource,
  type RemoteEnginesOptions,
} from "./peers/remote-engine.js";
export { RemoteEngines } from "./peers/remote-engines.js";
export { SharedLocalLists, SharedRemoteAgents } from "./peers/shared-agent-state.js";
export { importFrom } from "./registry/load-connector.js";
export {
  ConnectorScheduler,
  type ConnectorSchedulerOptions,
  type DecodeOrdersContext,
} from "./scheduler/connector-scheduler.js";
export {
  type BlocksToFetch,
  blocksToFetch,
  type DecodeOrders,
  type FetchOrder,
  type PromptSource,
  promptPrefix,
} from "./scheduler/decode-requests.js";
export { type Generation, Generations, type GenerationsOptions } from "./scheduler/generations.js";
export { ExpiringSet, type ExpiringSetOptions, OldestFirst } from "./scheduler/oldest-first.js";
export {
  PrefillScheduler,
  type PrefillSchedulerOptions,
  type PrefillStep,
} from "./scheduler/prefill-scheduler.js";
export { addressToNotify, readRemoteRequest } from "./scheduler/remote-requests.js";
export {
  type ConnectorStepMetadata,
  connectorStepMetadata,
  type HeartbeatChange,
  type HeartbeatRequest,
  type LeaseOrder,
  type RemoteRequest,
  type SendableRequest,
} from "./scheduler/step-types.js";
export { CLOSE_GRACE_MS, idleWithinGrace, TaskTracker } from "./task-tracker.js";
export { endWith, inSpan } from "./tracing/spans.js";
export {
  type ConnectorWorkerOptions,
  createConnectorWorker,
  type WorkerContext,
  type WorkerHalf,
  WorkerOutputQueue,
} from "./worker/connector-worker.js";
export { Leases, type LeasesOptions, type LeaseTerms, localLeaseTerms } from "./worker/leases.js";
export {
  type GuardedRequest,
  MessageGuard,
  type MessageGuardOptions,
} from "./worker/message-guard.js";
export {
  PendingReceive,
  PendingReceives,
  type PendingReceivesOptions,
  type ReceiveOrderBase,
  ReceivePass,
  type Receiver,
} from "./worker/pending-receives.js";
export {
  type FailureType,
  ReceiveError,
  type ReceiveFailedOptions,
} from "./worker/receive-error.js";
export { type RequestTransfers, type TransferFailed, transferAll } from "./worker/transfer-all.js";
