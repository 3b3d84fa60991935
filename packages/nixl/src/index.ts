export { type BackendChoice, chooseBackends } from "./backend-choice.js";
export { type BenchReport, type BenchRow, benchReportSchema } from "./bench/report.js";
export { type DeviceMemoryOptions, deviceMemory } from "./device-memory.js";
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
export { type MissingPart, nameOfMissing } from "./elf-loader.js";
export { type FabricDevice, fabricDevices, isEfaOnly } from "./fabric-devices.js";
export { type FileMemoryOptions, openFileMemory } from "./file-memory.js";
export { COMPANIONS, type Companion, type Installed, type InstallOptions, installNixl } from "./install.js";
export { type Environment, type FindLibraryOptions, findLibrary } from "./library.js";
export { type LibraryFeatures, lackedBy, libraryFeatures } from "./library-features.js";
export { type FrameOptions, frameMetadata, unframeMetadata } from "./metadata/frame.js";
export { type ObjectMemoryOptions, objectMemory } from "./object-memory.js";
export {
  type DescribePluginsOptions,
  describePlugins,
  type PluginDescription,
  summaryOf,
} from "./plugins.js";
export { type NixlTransportOptions, nixlTransport } from "./transport.js";
export type { Cuda } from "./wheels.js";
