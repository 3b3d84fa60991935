export type { FaultKind, FaultOperation, FaultRule, FaultSubject } from "./network/fault-plan.js";
export type { MemoryHost } from "./network/host.js";
export type { MemoryLatency } from "./network/latency.js";
export type { HostNamedOptions, MemoryNetworkOptions, OutstandingKind } from "./network/network.js";
export { type MemoryNetwork, memoryNetwork } from "./network/network.js";
export { type MemorySideChannelOptions, memorySideChannel } from "./network/side-channel.js";
export { sceneNetwork } from "./scene-network.js";
export { type SeededRandom, seededRandom } from "./simulation/seeded-random.js";
export {
  type VirtualClock,
  type VirtualClockOptions,
  virtualClock,
} from "./simulation/virtual-clock.js";
export { type MemoryTransport, type MemoryTransportOptions, memoryTransport } from "./transport.js";
