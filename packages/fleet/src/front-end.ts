/** `@kv/fleet/front-end`: what the front ends `kv-proxy` and `kv-epp` share. */

export * from "./admin/admin-server.js";
export * from "./admin/instance-changes.js";
export * from "./fleet.js";
export { addressOf, hostOf, KV_SOURCE_HEADER, PREFILLER_HEADER } from "./instances/instance.js";
export { getOrAdd, putLast } from "./instances/pooled-instance.js";
export { type KvHolder, type KvSource, remoteKvSource } from "./kv-sources/kv-sources.js";
export {
  type CommandLine,
  createCommand,
  merged,
  readCommandLine,
  readConfigFile,
} from "./program/command-line.js";
export * from "./program/connect-kubernetes.js";
export * from "./program/fleet-flags.js";
export * from "./program/reload.js";
export * from "./readback/cache-capacity.js";
export * from "./readback/kept-objects.js";
export * from "./readback/kv-object.js";
export * from "./readback/turn-digests.js";
export * from "./repeat.js";
export * from "./request/deadline.js";
export * from "./request/generation-request.js";
export * from "./request/routes.js";
export { type EndedPrefill, PrefillCosts } from "./routing/prefill-costs.js";
export * from "./settings/fleet-settings.js";
export * from "./settings/invalid-config.js";
export * from "./settings/settings-table.js";
export * from "./telemetry/autoscaling-signals.js";
export * from "./telemetry/json-log.js";
export * from "./telemetry/open-tracer.js";
export * from "./telemetry/prometheus.js";
export * from "./upstream/forwarded-headers.js";
export * from "./upstream/upstream.js";
