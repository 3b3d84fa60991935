export { type FabricDevice, fabricDevices, isEfaOnly } from "./backends/fabric-devices.js";
export {
  type DescribePluginsOptions,
  describePlugins,
  type PluginDescription,
  summaryOf,
} from "./backends/plugins.js";
export { type BackendChoice, chooseBackends } from "./backends/select-backends.js";
export { type BenchReport, type BenchRow, benchReportSchema } from "./bench/report.js";
export {
  type CheckReport,
  checkSchemaOf,
  checksText,
  reportOfChecks,
  reportSchemaOf,
  type Verdict,
} from "./doctor/check-report.js";
export { type DoctorOptions, doctor } from "./doctor/doctor.js";
export type { Host } from "./doctor/host.js";
export {
  type Check,
  type DoctorReport,
  doctorReportSchema,
  reportText as doctorText,
} from "./doctor/report.js";
export {
  COMPANIONS,
  type Companion,
  type Installed,
  type InstallOptions,
  installNixl,
} from "./install/install.js";
export type { Cuda } from "./install/wheels.js";
export { type Environment, type FindLibraryOptions, findLibrary } from "./library/find-library.js";
export { type LibraryFeatures, lackedBy, libraryFeatures } from "./library/library-features.js";
export { type MissingPart, nameOfMissing } from "./library/missing-parts.js";
export { type DeviceMemoryOptions, deviceMemory } from "./memory/device-memory.js";
export { type FileMemoryOptions, openFileMemory } from "./memory/file-memory.js";
export { type ObjectMemoryOptions, objectMemory } from "./memory/object-memory.js";
export { type FrameOptions, frameMetadata, unframeMetadata } from "./metadata/frame.js";
export { type NixlTransportOptions, nixlTransport } from "./transport.js";
