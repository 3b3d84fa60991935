export type { FaultKind, FaultOperation, FaultRule, FaultSubject } from "./fault-plan.js";
export type { MemoryHost } from "./host.js";
export type { MemoryLatency } from "./latency.js";
export {
  type HostNamedOptions,
  type MemoryNetwork,
  type MemoryNetworkOptions,
  memoryNetwork,
  type OutstandingKind,
} from "./network.js";
export { type SeededRandom, seededRandom } from "./seeded-random.js";
export { type MemorySideChannelOptions, memorySideChannel } from "./side-channel.js";
export { type MemoryTransportOptions, memoryTransport } from "./transport.js";
export { type VirtualClock, type VirtualClockOptions, virtualClock } from "./virtual-clock.js";
