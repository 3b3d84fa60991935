export type { HttpLimits } from "@kv/http";
export {
  type Check,
  type Report,
  type Role,
  reportSchema,
  reportText,
  verifyText,
} from "./checks/report.js";
export type { MemoryCheckOptions } from "./doctor/memory/memory-checks.js";
export { type PairDoctorOptions, pairDoctor } from "./doctor/pair-doctor.js";
export { readTarget, type Target } from "./doctor/target.js";
export {
  type HeadlessDecode,
  type HeadlessDecodeOptions,
  openHeadlessDecode,
  type ReceiveResult,
  UNWRITTEN_BYTE,
} from "./headless/headless-decode.js";
export type { HeadlessEngineOptions, HeadlessRegion } from "./headless/headless-engine.js";
export {
  type HeadlessPrefill,
  type HeadlessPrefillOptions,
  openHeadlessPrefill,
} from "./headless/headless-prefill.js";
export {
  type PrefillLimits,
  PrefillServer,
  type PrefillServerOptions,
} from "./headless/prefill-server.js";
export {
  type Answer,
  type CallOptions,
  EngineServer,
  type EngineServerOptions,
  type Prompt,
  type ServedModel,
} from "./http/engine-server.js";
export type { MetricSamples } from "./http/prometheus-text.js";
export type { LeakReport } from "./load/block-leaks.js";
export {
  type Fault,
  type LoadOptions,
  type LoadResult,
  load,
  type PromptResult,
} from "./load/load.js";
export {
  type LoadLimits,
  type LoadReport,
  loadReport,
  loadReportSchema,
  loadText,
} from "./load/load-report.js";
export type { GivenGroups } from "./protocol/cache-groups.js";
export type { SideChannelAddress } from "./protocol/remote-engine.js";
export { type Difference, type DiffOptions, diffRecordings } from "./recording/diff.js";
export { type RecordOptions, record } from "./recording/record.js";
export {
  createRecording,
  type Manifest,
  manifestSchema,
  openRecording,
  type RecordedHandshake,
  type RecordedPrompt,
  type RecordedSide,
  type Recording,
  type RecordingWriter,
} from "./recording/recording.js";
export type { LaneEvidence, LoggedLanes } from "./verify/lane.js";
export { type VerifyOptions, verify } from "./verify/verify.js";
