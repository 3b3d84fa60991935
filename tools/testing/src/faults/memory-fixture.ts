import type { Transport } from "@kv/interface";
import {
  type FaultRule,
  memoryNetwork,
  type SeededRandom,
  virtualClock,
} from "@kv/transport-memory";
import { createSimEngine } from "../simulator/sim-engine.js";
import type { SimDevice, SimDeviceAround } from "../simulator/sim-options.js";
import type { FaultFixture } from "./fault-fixture.js";
import type { Sabotage } from "./sabotage.js";

interface MemoryFixtureOptions {
  readonly random: SeededRandom;
  readonly rules: readonly FaultRule[];
  /** See `FaultRunOptions`. */
  readonly plainProducers: boolean;
  readonly sabotage?: Sabotage | undefined;
  readonly wrapTransport?: ((transport: Transport) => Transport) | undefined;
  readonly device?:
    | ((around: SimDeviceAround, random: SeededRandom) => SimDevice | undefined)
    | undefined;
}

/** Longer than any lease of a fault run. */
const REST_MS = 30_000;

/** The memory transport in virtual time. The same seed gives the same run. */
export function memoryFixture(options: MemoryFixtureOptions): FaultFixture {
  const { plainProducers, sabotage, wrapTransport, device } = options;
  const clock = virtualClock();
  const network = memoryNetwork({
    clock,
    random: options.random,
    latency: { latencyMs: 1, jitterMs: 3, minPieces: 3, lingerMs: 6 },
    faults: options.rules,
  });
  return {
    clock,
    start: ({ layerwise, ...order }, random) =>
      createSimEngine({
        network,
        ...order,
        reportsLayers: layerwise,
        plain: plainProducers,
        sabotage,
        wrapTransport,
        ...(device === undefined
          ? {}
          : { device: (around) => device(around, random.fork("device")) }),
      }),
    settle: (work) => clock.settle(work, { limitMs: 48 * 3_600_000 }),
    waitUntilIdle: () => clock.advance(REST_MS),
    async countHeld() {
      await clock.advance(10_000);
      return { ...network.outstanding(), timers: clock.pendingTimers };
    },
    faultCounts: () => network.faultCounts() as Record<string, number>,
  };
}
