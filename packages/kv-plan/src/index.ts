/**
 * `@kv/kv-plan`: the report of `kv-plan` for programs with another source of geometry. `kv-peer
 * plan` asks running engines.
 */
export { MAX_RANKS, type Pair } from "./input/pair.js";
export { type ConfiguredGroups, groupsOfConfig } from "./input/read-pair.js";
export { postingLines } from "./render/posting-lines.js";
export { postingOf } from "./report/posting.js";
export {
  type BlockReport,
  type DescriptorCount,
  type EngineReport,
  type KindReport,
  type PairReport,
  type PlanReport,
  type PostingReport,
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
