/**
 * `@kv/kv-plan`: the report of `kv-plan`, for programs that get the geometry of two engines in another way. `kv-peer plan` asks running
 * engines, and prints the same report.
 */
export { MAX_RANKS, type Pair } from "./input/pair.js";
export {
  type BlockReport,
  type EngineReport,
  type PairReport,
  type PlanReport,
  type PrefillRank,
  type RankReport,
  REPORT_VERSION,
  type ReadReport,
  type RefusalReport,
  type StageReport,
} from "./report/report.js";
export type { PoolState } from "./report/sample-request.js";
export { addReportOptions, type ReportOptions } from "./report-options.js";
export { type Output, printReport } from "./run.js";
