export type { Deadline } from "./deadline.js";
export type { DiscoveredInstances, Discovery } from "./discovery.js";
export { dnsDiscovery, fileDiscovery, type Resolver } from "./discovery-sources.js";
export type { Endpoint } from "./endpoint.js";
export type { Trail } from "./exchange.js";
export type { Instance, InstanceId, InstanceKv, InstanceSpec, InstanceStatus, Visit } from "./instance.js";
export type { InstancePool } from "./instances.js";
export type { CachedPrefixes } from "./kv-event-index.js";
export { leastLoad } from "./least-load.js";
export type { LegAnswer, LegOrder, LegOrderOptions, Part } from "./leg-order.js";
export {
  type ProxyLimits,
  type ProxyPolicy,
  type ProxySettings,
  type ProxySettingsInput,
  type ProxyTimeouts,
  proxySettingsSchema,
} from "./options.js";
export { type PrefixAwareOptions, prefixAware } from "./prefix-aware.js";
export { createProxy, type Proxy, type ProxyAddress, type ProxyOptions, type ProxyStatus } from "./proxy.js";
export { createPullOrder } from "./pull-order.js";
export { createPushOrder, type PushOrderOptions } from "./push-order.js";
export type { GenerationRequest } from "./request-body.js";
export { type FailedAttempt, type RetryPolicy, retryWhereSafe } from "./retry.js";
export { type Routing, type RoutingContext, roundRobin } from "./routing.js";
export { sessionAffinity } from "./session-affinity.js";
export type { LegSpan, Tracing } from "./tracing.js";
export type { TrafficStatus } from "./traffic.js";
export {
  createHttpUpstream,
  type FailureStage,
  type Role,
  type Upstream,
  type UpstreamAnswer,
  type UpstreamRequest,
} from "./upstream.js";
