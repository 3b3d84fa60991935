/** `@kv/fleet/front-end`: what the front ends `kv-proxy` and `kv-epp` share. */

export {
  ADMIN_LIMITS,
  type AdminOperations,
  AdminServer,
  type AdminServerOptions,
  type PageOperations,
  requireToken,
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
export { KV_SOURCE_HEADER, PREFILLER_HEADER } from "./instances/instance.js";
export { type KvHolder, type KvSource, remoteKvSource } from "./kv-sources/kv-sources.js";
export {
  type CommandLine,
  createCommand,
  merged,
  readCommandLine,
  readConfigFile,
} from "./program/command-line.js";
export { connectKubernetes } from "./program/connect-kubernetes.js";
export { fleetFlags, requireInstances, withFleetFlags } from "./program/fleet-flags.js";
export {
  type Reloaded,
  type ReloadOptions,
  reloadAtHangup,
  reloadedSettings,
} from "./program/reload.js";
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
export { type JsonLog, jsonLog, LOG_LEVELS, type LogLevel } from "./telemetry/json-log.js";
export { type OpenedTracer, openTracer } from "./telemetry/open-tracer.js";
export {
  bothMetrics,
  type MetricAsJson,
  PrometheusMetrics,
  WorkerMetrics,
} from "./telemetry/prometheus.js";
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
