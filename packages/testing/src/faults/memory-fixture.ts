import { type FaultRule, memoryNetwork, type SeededRandom, virtualClock } from "@kv/transport-memory";
import { createSimEngine } from "../simulator/sim-engine.js";
import type { FaultFixture } from "./fault-fixture.js";
import type { FaultRunOptions } from "./fault-run.js";

type Faulty = Pick<FaultRunOptions, "sabotage" | "wrapTransport" | "device">;
type MemoryFixtureOptions = { readonly [Name in keyof Faulty]: Faulty[Name] | undefined } & {
  readonly random: SeededRandom;
  readonly rules: readonly FaultRule[];
  /** See `FaultRunOptions`. */
  readonly plainProducers: boolean;
};

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
        ...{ sabotage, wrapTransport },
        ...(device === undefined ? {} : { device: (around) => device(around, random.fork("device")) }),
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
