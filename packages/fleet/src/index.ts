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
export {
  HealthChecks,
  type HealthProbe,
  type HealthProbeRequest,
  type HealthSettings,
} from "./health/health-checks.js";
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
export {
  type InstanceSpecInput,
  instanceSpecSchema,
  parseInstanceSpec,
} from "./instances/instance-spec.js";
export type {
  InstanceTimes,
  OutlierDetection,
  PooledInstance,
  PooledInstanceOptions,
} from "./instances/pooled-instance.js";
export type { Steps } from "./kv-events/block-index.js";
export type { CacheGroup, RemovedBlocks, StoredBlocks } from "./kv-events/kv-event-batch.js";
export {
  type KvEventIndex,
  type KvEventSource,
  KvEventStream,
} from "./kv-events/kv-event-stream.js";
export {
  type CachedPrefixes,
  KvEventSubscriber,
  type KvEventSubscriberOptions,
  kvEventTurns,
} from "./kv-events/kv-event-subscriber.js";
export type { InstanceGet, InstanceGetRequest } from "./pairing/engine-facts.js";
export type {
  AnsweredEngine,
  AnyPartner,
  PairedInstance,
  Partner,
} from "./pairing/kinds.js";
export { Pairing } from "./pairing/pairing.js";
export {
  PAIRING_MODES,
  type PairingMode,
  type PairingOptions,
  type PairingSettings,
} from "./pairing/pairing-settings.js";
export {
  assumedGroups,
  CONVERSIONS,
  hasMla,
  hasStates,
  type PairToPlan,
  planRanks,
  rankGeometry,
  vllmLimit,
} from "./pairing/plan-pair.js";
export type { RoutedRequest } from "./request/generation-request.js";
export { builtInRouting, ROUTING_NAMES, type RoutingName } from "./routing/built-in-routings.js";
export {
  type DisaggregationInputs,
  type DisaggregationReason,
  decideDisaggregation,
} from "./routing/disaggregation.js";
export { InstancePool, type InstancePoolOptions } from "./routing/instance-pool.js";
export { type PrefixAwareOptions, prefixAware } from "./routing/prefix-aware.js";
export {
  leastLoad,
  type Routing,
  type RoutingContext,
  roundRobin,
} from "./routing/routing.js";
export { sessionAffinity } from "./routing/session-affinity.js";
