import type { Clock, ConnectorModule, Transport } from "@kv/interface";
import {
  type FaultRule,
  memoryNetwork,
  type SeededRandom,
  virtualClock,
} from "@kv/transport-memory";
import { createSimEngine, type SimEngine } from "../simulator/sim-engine.js";
import type { SimDevice, SimDeviceAround, SimEngineOptions } from "../simulator/sim-options.js";
import type { Sabotage } from "./sabotage.js";

type Counts = Readonly<Record<string, number>>;

/** An engine of a fault run, in this process or elsewhere. */
export interface FaultEngine
  extends Pick<
    SimEngine,
    "engineId" | "tpSize" | "address" | "prefill" | "abort" | "kill" | "close"
  > {
  decode(...request: Parameters<SimEngine["decode"]>): Promise<unknown>;
  outstanding(): Counts | Promise<Counts>;
}

export interface FaultEngineOrder
  extends Pick<
    SimEngineOptions,
    "hostName" | "engineId" | "tpSize" | "blockSize" | "numBlocks" | "violation"
  > {
  readonly skewMs: number;
  readonly layerwise: boolean;
  readonly extra: Readonly<Record<string, unknown>>;
  readonly receiveDeadlineMs: number;
  readonly loadFailurePolicy: "fail" | "recompute";
  readonly connector?: ConnectorModule | undefined;
}

export interface FaultFixture {
  readonly clock: Clock;
  start(order: FaultEngineOrder, random: SeededRandom): Promise<FaultEngine>;
  settle<T>(work: Promise<T>): Promise<T>;
  waitUntilIdle(engines: readonly FaultEngine[]): Promise<void>;
  countHeld(): Promise<Counts>;
  faultCounts(): Counts;
}

export interface MemoryFixtureOptions {
  readonly rules?: readonly FaultRule[];
  /**
   * The producers speak only vLLM's protocol. Parameters are used once, and a restarted producer
   * has another engine id, as in vLLM.
   */
  readonly plainProducers?: boolean;
  readonly sabotage?: Sabotage;
  readonly wrapTransport?: (transport: Transport) => Transport;
  readonly device?: (around: SimDeviceAround, random: SeededRandom) => SimDevice | undefined;
}

const REST_MS = 30_000;

/** In virtual time: the same seed gives the same run. */
export function memoryFixture(
  networkRandom: SeededRandom,
  { rules = [], plainProducers = false, sabotage, wrapTransport, device }: MemoryFixtureOptions,
): FaultFixture {
  const clock = virtualClock();
  const network = memoryNetwork({
    clock,
    random: networkRandom,
    latency: { latencyMs: 1, jitterMs: 3, minPieces: 3, lingerMs: 6 },
    faults: rules,
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
        device: device && ((around) => device(around, random.fork("device"))),
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
