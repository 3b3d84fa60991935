export * from "./memory-metrics.js";
export { METRIC_BUCKETS, METRIC_HELP, METRICS } from "./metric-names.js";
