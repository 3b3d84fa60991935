export {
  type DiscoveredInstances,
  type Discovery,
  DiscoveryFollower,
  type DnsNames,
  dnsDiscovery,
  fileDiscovery,
  type Polling,
  type Resolver,
} from "./discovery/discovery.js";
export * from "./health/health-checks.js";
export {
  type FailureStage,
  failureStage,
  type Instance,
  type InstanceId,
  type InstanceKv,
  type InstanceSpec,
  type InstanceStatus,
  instanceName,
  type KvEventStatus,
  type PairingStatus,
  type Role,
  type Visit,
} from "./instances/instance.js";
export * from "./instances/instance-spec.js";
export type {
  InstanceTimes,
  OutlierDetection,
  PooledInstance,
  PooledInstanceOptions,
} from "./instances/pooled-instance.js";
export type { Steps } from "./kv-events/block-index.js";
export type { CacheGroup, RemovedBlocks, StoredBlocks } from "./kv-events/kv-event-batch.js";
export * from "./kv-events/kv-event-stream.js";
export * from "./kv-events/kv-event-subscriber.js";
export type { InstanceGet, InstanceGetRequest } from "./pairing/engine-facts.js";
export type { AnsweredEngine, AnyPartner, Partner } from "./pairing/kinds.js";
export { Pairing } from "./pairing/pairing.js";
export * from "./pairing/pairing-settings.js";
export * from "./pairing/plan-pair.js";
export type { RoutedRequest } from "./request/generation-request.js";
export * from "./routing/built-in-routings.js";
export * from "./routing/disaggregation.js";
export * from "./routing/instance-pool.js";
export * from "./routing/prefix-aware.js";
export {
  leastLoad,
  type Routing,
  type RoutingContext,
  roundRobin,
} from "./routing/routing.js";
export { sessionAffinity } from "./routing/session-affinity.js";
