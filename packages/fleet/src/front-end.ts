/**
 * `@kv/fleet/front-end`: what the programs in front of P and D share, `kv-proxy` and `kv-epp`: the
 * fleet as one object, the client's request, the HTTP client to instances, flags and settings,
 * metrics and log.
 */

export { requireToken } from "./admin/admin-origin.js";
export {
  ADMIN_LIMITS,
  type AdminOperations,
  AdminServer,
  type AdminServerOptions,
  type PageOperations,
} from "./admin/admin-server.js";
export {
  changeInstance,
  INSTANCE_CHANGES,
  type InstanceChange,
  type NamedInstance,
  readChange,
} from "./admin/instance-changes.js";
export {
  Fleet,
  type FleetHealth,
  type FleetOptions,
  type FleetStatus,
  type FrontEndOptions,
} from "./fleet.js";
export { PREFILLER_HEADER } from "./instances/instance.js";
export {
  type CommandLine,
  createCommand,
  merged,
  readCommandLine,
  readConfigFile,
} from "./program/command-line.js";
export { connectKubernetes } from "./program/connect-kubernetes.js";
export { fleetFlags, requireInstances, withFleetFlags } from "./program/fleet-flags.js";
export { CacheCapacities, type CacheCapacity } from "./readback/cache-capacity.js";
export {
  type FoundLengths,
  type KeepAnswer,
  type KeptObject,
  KeptObjects,
  type PinnedStatus,
} from "./readback/kept-objects.js";
export { type KvObject, readKvObject } from "./readback/kv-object.js";
export { TurnDigests } from "./readback/turn-digests.js";
export { Deadline, LazyAbort } from "./request/deadline.js";
export {
  bodyLength,
  checkDecodeBody,
  type Endpoint,
  type GenerationRequest,
  type PromptFields,
  parseGenerationRequest,
  parseRequestInSteps,
  promptIds,
  REQUEST_ID_LENGTH,
  type RequestBody,
  refuseConnectorMembers,
  requestIdOf,
  traceparentOf,
  withLongMembers,
  writtenIds,
} from "./request/generation-request.js";
export {
  DECODE_ROUTES,
  ENDPOINTS,
  REFUSED_ROUTES,
  SIDECAR_ROUTES,
  whyRefused,
} from "./request/routes.js";
export { type EndedPrefill, PrefillCosts } from "./routing/prefill-costs.js";
export {
  type FleetSettings,
  type FleetSettingsInput,
  fleetSettings,
  instanceTimes,
  parseSettings,
} from "./settings/fleet-settings.js";
export {
  count,
  counted,
  group,
  listenerPort,
  ms,
  setting,
  settingsIn,
} from "./settings/settings-table.js";
export {
  AutoscalingSignals,
  type InstanceLoad,
  type MeasuredSignals,
  type RecommendedInstances,
  type SignalsStatus,
  signalsOf,
} from "./telemetry/autoscaling-signals.js";
export { jsonLog, LOG_LEVELS, type LogLevel } from "./telemetry/json-log.js";
export { type OpenedTracer, openTracer } from "./telemetry/open-tracer.js";
export { bothMetrics, type MetricAsJson, PrometheusMetrics } from "./telemetry/prometheus.js";
export { WorkerMetrics } from "./telemetry/worker-metrics.js";
export { BodyQueue, type LimitedBody } from "./upstream/body-queue.js";
export {
  CLIENT_HEADERS,
  type ForwardedHeaders,
  forwardedHeaders,
  mayForward,
} from "./upstream/forwarded-headers.js";
export {
  answerHeaders,
  changedBodyHeaders,
  LEFT_OUT_HEADER,
  legHeaders,
  Upstream,
  type UpstreamAnswer,
  type UpstreamRequest,
} from "./upstream/upstream.js";
