export type { LocalMetadataOptions, NixlAgent } from "./agent/agent.js";
export type { PostOptions, PreparedTransfer } from "./agent/prepared-transfer.js";
export type { RegisterOptions } from "./agent/registrations.js";
export type { NixlTransfer, NixlTransferResult, NixlTransferTelemetry } from "./agent/transfers.js";
export {
  type DescribePluginsOptions,
  describePlugins,
  type PluginDescription,
  summaryOf,
} from "./backends/plugins.js";
export { type RdmaDevice, rdmaDevices } from "./backends/rdma-devices.js";
export { readUcxProtocols, type UcxProtocol } from "./doctor/checks/ucx-protocols.js";
export { type DoctorOptions, doctor } from "./doctor/doctor.js";
export { doctorText } from "./doctor/report.js";
export type { Environment } from "./environment.js";
export { type Host, realHost } from "./host.js";
export { type Installed, type InstallOptions, installNixl, useNixl } from "./install/install.js";
export type { Cuda } from "./install/wheels.js";
export { type FindLibraryOptions, findLibrary } from "./library/find-library.js";
export type { MissingPart } from "./library/missing-parts.js";
export { type DescriptorRow, descriptorRows } from "./memory/descriptor-rows.js";
export { type DeviceMemoryOptions, deviceMemory } from "./memory/device-memory.js";
export { type HostMemoryDescription, hostMemory, sharedMemory } from "./memory/host-range.js";
export {
  type FileMemoryOptions,
  type ObjectMemoryOptions,
  objectMemory,
  openFileMemory,
} from "./memory/storage-memory.js";
export type { BenchReport, BenchRow, Check, DoctorReport } from "./reports.js";
export {
  type NixlCreateAgentOptions,
  type NixlTransport,
  type NixlTransportOptions,
  nixlTransport,
} from "./transport.js";
