export type { Deadline } from "./deadline.js";
export type { Exchange, Flow, Trail } from "./exchange.js";
export type { Instance, InstancePool, InstanceStatus, Visit } from "./instances.js";
export {
  type ProxyLimits,
  type ProxyPolicy,
  type ProxySettings,
  type ProxySettingsInput,
  type ProxyTimeouts,
  proxySettingsSchema,
} from "./options.js";
export { createProxy, type Proxy, type ProxyAddress, type ProxyOptions, type ProxyStatus } from "./proxy.js";
export { createPullFlow, type PullFlowOptions } from "./pull-flow.js";
export type { Endpoint, GenerationRequest } from "./request-body.js";
export { type FailedAttempt, type RetryPolicy, retryWhereSafe } from "./retry.js";
export { type Routing, type RoutingContext, roundRobin } from "./routing.js";
export type { TrafficStatus } from "./traffic.js";
export {
  createHttpUpstream,
  type FailureStage,
  type Role,
  type Upstream,
  type UpstreamAnswer,
  type UpstreamRequest,
} from "./upstream.js";
