/**
 * `@kv/fleet/front-end`: what the programs in front of P and D share, `kv-proxy` and `kv-epp`: the fleet as one object, the client's request, the HTTP
 * client to instances, flags and settings, metrics and log.
 */

export { Fleet, type FleetHealth, type FleetOptions } from "./fleet.js";
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
export { Deadline, LazyAbort } from "./request/deadline.js";
export {
  bodyLength,
  type Endpoint,
  type GenerationRequest,
  type PromptFields,
  parseGenerationRequest,
  parseRequestInSteps,
  type RequestBody,
  refuseConnectorMembers,
  withLongMembers,
} from "./request/generation-request.js";
export { type EndedPrefill, PrefillCosts, usageOf } from "./routing/prefill-costs.js";
export {
  type FleetSettings,
  type FleetSettingsInput,
  fleetSettings,
  instanceTimes,
  parseSettings,
} from "./settings/fleet-settings.js";
export { count, counted, group, listenerPort, ms, setting, settingsIn } from "./settings/settings-table.js";
export {
  AutoscalingSignals,
  type InstanceLoad,
  type MeasuredSignals,
  type RecommendedInstances,
  type SignalsStatus,
  signalsOf,
} from "./telemetry/autoscaling-signals.js";
export { jsonLog, LOG_LEVELS, type LogLevel } from "./telemetry/json-log.js";
export { bothMetrics, type MetricAsJson, PrometheusMetrics } from "./telemetry/prometheus.js";
export { WorkerMetrics } from "./telemetry/worker-metrics.js";
export { BodyQueue, type LimitedBody } from "./upstream/body-queue.js";
export {
  answerHeaders,
  changedBodyHeaders,
  forwardedHeaders,
  legHeaders,
  mayForward,
  REQUEST_ID_LENGTH,
  requestIdOf,
  traceparentOf,
} from "./upstream/headers.js";
export { PromptRenderer, type PromptRendererOptions } from "./upstream/prompt-renderer.js";
export { Upstream, type UpstreamAnswer, type UpstreamRequest } from "./upstream/upstream.js";
