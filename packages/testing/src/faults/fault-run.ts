import type { ConnectorModule, Transport } from "@kv/interface";
import { type FaultRule, type SeededRandom, seededRandom } from "@kv/transport-memory";
import type { SimDevice, SimDeviceAround } from "../simulator/sim-options.js";
import { createFaultClient, type FaultSeats, type FaultTimes } from "./fault-client.js";
import { deathsByRequests, deathsByTime } from "./fault-deaths.js";
import type { FaultEngine, FaultFixture } from "./fault-fixture.js";
import { FAULT_RULES, LONG_MS, PLAIN_FAULT_RULES } from "./fault-rules.js";
import { memoryFixture } from "./memory-fixture.js";
import type { Sabotage } from "./sabotage.js";

/** What is run, wherever it runs. */
export interface FaultLoad {
  readonly seed: string;
  readonly requests: number;
  /** Pull by default. */
  readonly connector?: ConnectorModule;
  /**
   * Producers that speak vLLM's protocol and nothing more. Then time alone tells whether blocks were kept, parameters are used once, and
   * a restarted producer has another engine id, as vLLM's has.
   */
  readonly plainProducers?: boolean;
  /** The share of requests whose two legs go out at once, the consumer with the producer's coordinates alone. */
  readonly atOnce?: number;
  /** Of each engine: few enough that freed blocks are in use again soon. */
  readonly numBlocks?: number;
  /** `push_layerwise`, and engines that report a layer while they compute. */
  readonly layerwise?: boolean;
  readonly clients?: number;
  readonly times?: FaultTimes;
  /** An engine dies each time that so many requests were taken, whatever the time; else by virtual time. */
  readonly deathEvery?: number;
}

export interface FaultRunOptions extends FaultLoad {
  /** Breaks a rule on purpose: the run must find out. */
  readonly sabotage?: Sabotage;
  readonly wrapTransport?: (transport: Transport) => Transport;
  readonly rules?: readonly FaultRule[];
  /** Accelerators, for the engines that it answers one for. */
  readonly device?: (around: SimDeviceAround, random: SeededRandom) => SimDevice | undefined;
}

export interface FaultRunReport {
  /** What must never be; the first few, and how many there were. */
  readonly violations: readonly string[];
  readonly violationCount: number;
  /** Requests by outcome: "ok", or the code of the error. */
  readonly outcomes: Readonly<Record<string, number>>;
  readonly faults: Readonly<Record<string, number>>;
  readonly kills: number;
  /** In the run's own time. */
  readonly seconds: number;
  /** What is left when all is over and closed. */
  readonly left: Readonly<Record<string, number>>;
}

const TIMES: FaultTimes = {
  leaseMs: 6000,
  requestTimeoutMs: 15_000,
  deadlineMs: 16_000,
  longMs: LONG_MS,
};

interface Seat {
  readonly hostName: string;
  readonly tpSize: number;
  readonly blockSize: number;
  readonly skewMs: number;
  starts: number;
  engine: FaultEngine | undefined;
}

/**
 * Many requests through prefill and decode engines of different shapes, in virtual time, while everything that can go wrong does.
 * One seed is one run, down to the last byte.
 */
export function faultRun(options: FaultRunOptions): Promise<FaultRunReport> {
  const { plainProducers = false, rules, sabotage, wrapTransport, device, ...load } = options;
  const root = seededRandom(load.seed);
  const ground = memoryFixture({
    random: root.fork("network"),
    rules: rules ?? (plainProducers ? PLAIN_FAULT_RULES : FAULT_RULES),
    ...{ plainProducers, sabotage, wrapTransport, device },
  });
  return faultRunOn(ground, { ...load, plainProducers }, root);
}

/** The same on any ground. */
export async function faultRunOn(
  ground: FaultFixture,
  load: FaultLoad,
  root: SeededRandom = seededRandom(load.seed),
): Promise<FaultRunReport> {
  const { requests, plainProducers = false, atOnce = 0, numBlocks = 96, layerwise = false } = load;
  const { clients = 48, times = TIMES } = load;
  const { clock } = ground;
  const startedMs = clock.now();
  const violations: string[] = [];
  let violationCount = 0;
  const violation = (what: string) => {
    violationCount += 1;
    if (violations.length < 10) violations.push(`at ${(clock.now() - startedMs).toFixed(1)} ms: ${what}`);
  };
  const outcomes: Record<string, number> = {};
  const left: Record<string, number> = {};
  const seat = (hostName: string, tpSize: number, blockSize: number, skewMs: number): Seat => ({
    ...{ hostName, tpSize, blockSize, skewMs },
    starts: 0,
    engine: undefined,
  });
  const prefills = [seat("p0", 1, 16, 7_000_000), seat("p1", 2, 16, -3_000_000)];
  const decodes = [seat("d0", 1, 16, 0), seat("d1", 2, 32, 11_111)];
  const all = [...prefills, ...decodes];
  const deaths = load.deathEvery === undefined ? deathsByTime(clock) : deathsByRequests(load.deathEvery);
  let kills = 0;
  let taken = 0;

  async function start(place: Seat, random: SeededRandom): Promise<void> {
    place.starts += 1;
    // Half of the restarts keep the engine's id, as a configured one does.
    const generation = !plainProducers && random.next() < 0.5 ? 0 : place.starts;
    const { hostName, tpSize, blockSize, skewMs } = place;
    place.engine = await ground.start(
      {
        ...{ hostName, tpSize, blockSize, skewMs, numBlocks, layerwise, violation },
        engineId: `${hostName}-${generation}`,
        receiveDeadlineMs: times.deadlineMs,
        extra: {
          kv_lease_duration: times.leaseMs / 1000,
          request_timeout: times.requestTimeoutMs / 1000,
          engine_ttl: 30,
          push_layerwise: layerwise,
        },
        // One decode engine computes what did not arrive, the other fails it.
        loadFailurePolicy: hostName === "d1" ? "recompute" : "fail",
        ...(load.connector === undefined ? {} : { connector: load.connector }),
      },
      random,
    );
  }

  const sleep = (ms: number) => new Promise<void>((resolve) => void clock.setTimer(resolve, ms));
  const among = (seats: readonly Seat[]): FaultSeats => ({
    async living(random) {
      for (;;) {
        const up = seats.flatMap(({ engine, blockSize }) =>
          engine === undefined ? [] : { engine, blockSize },
        );
        if (up.length > 0) return pick(up, random);
        await sleep(100);
      }
    },
  });
  const { one } = createFaultClient({
    ...{ clock, times, atOnce, plainProducers, violation },
    prefills: among(prefills),
    decodes: among(decodes),
  });

  async function client(random: SeededRandom): Promise<void> {
    while (taken < requests) {
      const turn = deaths.mayTake(taken);
      if (turn !== undefined) await turn;
      if (taken >= requests) return;
      taken += 1;
      const outcome = await one(taken, random.fork(`request ${taken}`));
      outcomes[outcome] = (outcomes[outcome] ?? 0) + 1;
    }
  }

  /** Kills an engine every so often and starts its successor after a while. */
  async function reaper(random: SeededRandom): Promise<void> {
    while (taken < requests) {
      await deaths.next(random);
      if (deaths.ended) return;
      const place = pick(all, random);
      if (place.engine === undefined) continue;
      kills += 1;
      const { engine } = place;
      place.engine = undefined;
      await engine.kill();
      await deaths.mourn(random);
      await start(place, random);
      deaths.over();
    }
  }

  await ground.see(Promise.all(all.map((place) => start(place, root.fork(place.hostName)))));
  const served = Promise.all(Array.from({ length: clients }, (_, i) => client(root.fork(`client ${i}`))));
  await ground.see(Promise.all([served.then(deaths.end), reaper(root.fork("reaper"))]));
  const engines = all.flatMap(({ engine }) => engine ?? []);
  // Whatever is still kept has a lease that ends.
  await ground.rest(engines);
  for (const { engine, hostName } of all) {
    for (const [name, count] of Object.entries((await engine?.outstanding()) ?? {})) {
      if (count !== 0) left[`${hostName}.${name}`] = count;
    }
  }
  await ground.see(Promise.all(engines.map((engine) => engine.close())));
  for (const [name, count] of Object.entries(await ground.end())) if (count !== 0) left[name] = count;
  return {
    violations,
    violationCount,
    outcomes,
    faults: ground.faultCounts(),
    kills,
    seconds: Math.round((clock.now() - startedMs) / 1000),
    left,
  };
}

function pick<T>(list: readonly T[], random: SeededRandom): T {
  return list[random.integer(list.length)] as T;
}
