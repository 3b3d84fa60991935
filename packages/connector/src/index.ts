export {
  type Environment,
  readTransferConfig,
  type TransferConfigSources,
} from "./config/transfer-config.js";
export { transferConfigJsonSchema } from "./config/transfer-config-schema.js";
export {
  type MemoryMetrics,
  type MemoryMetricsOptions,
  memoryMetrics,
} from "./metrics/memory-metrics.js";
export { METRIC_BUCKETS, METRIC_HELP, METRICS } from "./metrics/metric-names.js";
export {
  type DualConnectorOptions,
  dualConnector,
  multiConnector,
  multiConnectorOf,
} from "./multi-connector.js";
export { cpuPlatform } from "./platforms/cpu-platform.js";
export { type CudaPlatformOptions, cudaPlatform } from "./platforms/cuda-platform.js";
export { importFrom } from "./registry/load-connector.js";
export {
  type ConnectorChoice,
  type ConnectorLoader,
  type ConnectorRegistry,
  type ConnectorRegistryOptions,
  connectorRegistry,
  registerConnector,
  resolveConnector,
} from "./registry/registry.js";
export { type StagedOptions, staged } from "./staging/staged.js";
export { stagingPoolBlocks } from "./staging/staging-pool.js";
export type { StagingCopied } from "./staging/staging-step.js";
export {
  createWorkerOutputAggregator,
  type WorkerOutputAggregator,
} from "./worker/worker-output-aggregator.js";
