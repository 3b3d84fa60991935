export {
  type Environment,
  readTransferConfig,
  type TransferConfigSources,
} from "./config/transfer-config.js";
export { transferConfigJsonSchema } from "./config/transfer-config-schema.js";
export {
  METRIC_BUCKETS,
  METRIC_HELP,
  METRICS,
  type MemoryMetrics,
  type MemoryMetricsOptions,
  memoryMetrics,
} from "./metrics/memory-metrics.js";
export {
  type DualConnectorOptions,
  dualConnector,
  multiConnector,
  multiConnectorOf,
} from "./multi-connector.js";
export { type CudaPlatformOptions, cpuPlatform, cudaPlatform } from "./platforms.js";
export {
  type ConnectorChoice,
  type ConnectorLoader,
  type ConnectorRegistry,
  type ConnectorRegistryOptions,
  connectorRegistry,
  importFrom,
  registerConnector,
  resolveConnector,
} from "./registry/registry.js";
export { type StagedOptions, staged } from "./staging/staged.js";
export { stagingPoolBlocks } from "./staging/staged-scheduler.js";
export type { StagingCopied } from "./staging/staged-worker.js";
export {
  createWorkerOutputAggregator,
  type WorkerOutputAggregator,
} from "./worker/worker-output-aggregator.js";
