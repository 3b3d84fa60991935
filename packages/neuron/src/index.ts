export { neuronCaches } from "./caches.js";
export type { DeviceCounts, NeuronDevice } from "./device.js";
export { type DoctorOptions, doctor } from "./doctor/doctor.js";
export { type Check, type DoctorReport, doctorText } from "./doctor/report.js";
export { type NrtDeviceOptions, nrtDevice } from "./nrt-device.js";
export { type NeuronPlatformOptions, neuronPlatform } from "./platform.js";
export { cpuDevice, type SimulatedDeviceOptions, simulatedDevice } from "./simulated-device.js";
