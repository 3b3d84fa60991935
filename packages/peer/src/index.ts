export {
  type HeadlessDecode,
  type HeadlessDecodeOptions,
  type HeadlessRegion,
  openHeadlessDecode,
  UNTOUCHED,
} from "./decode/headless-decode.js";
export { type LoadOptions, type LoadResult, load } from "./decode/load.js";
export { loadPlot } from "./decode/load-plot.js";
export { type Gate, type LoadReport, loadReport, loadReportSchema } from "./decode/load-report.js";
export { loadText } from "./decode/load-text.js";
export { type Mirror, mirrorOf } from "./decode/mirror.js";
export { bytesInProcess } from "./doctor/bytes-process.js";
export { type PairDoctorOptions, pairDoctor } from "./doctor/doctor.js";
export { readTarget, type Target } from "./doctor/target.js";
export {
  type HeadlessPrefill,
  type HeadlessPrefillOptions,
  openHeadlessPrefill,
} from "./prefill/headless-prefill.js";
export { type PrefillServerOptions, prefillServer } from "./prefill/prefill-server.js";
export { type Difference, type DiffOptions, diffRecordings } from "./recording/diff.js";
export { type Manifest, manifestSchema } from "./recording/manifest.js";
export { type RecordOptions, record } from "./recording/record.js";
export {
  createRecording,
  openRecording,
  type Recording,
  type RecordingWriter,
} from "./recording/recording.js";
export { type Check, type PairReport, pairReportSchema } from "./report/check.js";
export { reportText } from "./report/text.js";
export { type EngineServer, type EngineServerOptions, engineServer } from "./server/server.js";
