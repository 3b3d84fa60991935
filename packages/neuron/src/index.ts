export type { DeviceCounts, NeuronDevice } from "./device/device.js";
export { type NrtDeviceOptions, nrtDevice } from "./device/nrt-device.js";
export {
  cpuDevice,
  type SimulatedDeviceOptions,
  simulatedDevice,
} from "./device/simulated-device.js";
export { type DoctorOptions, doctor } from "./doctor/doctor.js";
export { type Check, type DoctorReport, doctorReportSchema, doctorText } from "./doctor/report.js";
export { type NeuronPlatformOptions, neuronPlatform } from "./platform.js";
export { neuronCaches } from "./staging/neuron-caches.js";
