import { transportSuite } from "@kv/conformance/transport";
import { memoryNetwork, memoryTransport, seededRandom, virtualClock } from "@kv/transport-memory";

transportSuite({
  name: "memory",
  create: async () => memoryTransport(),
  detectsDamagedMetadata: true,
});

const clock = virtualClock();
const latency = { latencyMs: 0.5, jitterMs: 2, bytesPerMs: 1 << 20, minPieces: 4 };
const network = memoryNetwork({ clock, random: seededRandom("conformance"), latency });
transportSuite({
  name: "memory in virtual time",
  create: async () => memoryTransport({ network }),
  createMortal: async () => ({
    transport: memoryTransport({ network, host: "mortal" }),
    kill: async () => network.host("mortal").kill(),
  }),
  transfersTakeTime: true,
  progress: () => clock.advance(0.7),
});
