import type { ConnectorModule, Transport } from "@kv/interface";
import { type FaultRule, type SeededRandom, seededRandom } from "@kv/transport-memory";
import type { SimDevice, SimDeviceAround } from "../simulator/sim-options.js";
import { createFaultClient, type FaultSeats, type FaultTimes } from "./fault-client.js";
import { deathsByRequests, deathsByTime } from "./fault-deaths.js";
import type { FaultEngine, FaultFixture } from "./fault-fixture.js";
import { FAULT_RULES, LONG_MS, PLAIN_FAULT_RULES } from "./fault-rules.js";
import { memoryFixture } from "./memory-fixture.js";
import type { Sabotage } from "./sabotage.js";

/** The load of a fault run, independent of the fixture. */
export interface FaultLoad {
  readonly seed: string;
  readonly requests: number;
  /** Pull by default. */
  readonly connector?: ConnectorModule;
  /**
   * The producers speak only vLLM's protocol. A consumer then knows only from the time whether the
   * blocks were kept. Parameters are used once, and a restarted producer has another engine id, as
   * in vLLM.
   */
  readonly plainProducers?: boolean;
  /**
   * Fraction of requests whose two legs start at once. The consumer then has only the producer's
   * address and request id.
   */
  readonly atOnce?: number;
  /**
   * Number of blocks of each engine. It is small, so that freed blocks are allocated again soon.
   */
  readonly numBlocks?: number;
  /** Sets `push_layerwise`, and makes the engines report a layer while they compute. */
  readonly layerwise?: boolean;
  readonly clients?: number;
  readonly times?: FaultTimes;
  /**
   * An engine dies each time that clients have taken this many requests. By default, engines die at
   * times of the fixture's clock.
   */
  readonly deathEvery?: number;
}

export interface FaultRunOptions extends FaultLoad {
  /** Breaks a rule on purpose. The run must detect it. */
  readonly sabotage?: Sabotage;
  readonly wrapTransport?: (transport: Transport) => Transport;
  readonly rules?: readonly FaultRule[];
  /** Returns the accelerator of an engine, or undefined for an engine without one. */
  readonly device?: (around: SimDeviceAround, random: SeededRandom) => SimDevice | undefined;
}

export interface FaultRunReport {
  /** The first 10 violations. `violationCount` counts all of them. */
  readonly violations: readonly string[];
  readonly violationCount: number;
  /** Requests by outcome: "ok", or the code of the error. */
  readonly outcomes: Readonly<Record<string, number>>;
  readonly faults: Readonly<Record<string, number>>;
  readonly kills: number;
  /** Duration, measured by the fixture's clock. */
  readonly seconds: number;
  /** Counts of what is still held after all requests ended, and after all engines are closed. */
  readonly left: Readonly<Record<string, number>>;
}

const TIMES: FaultTimes = {
  leaseMs: 6000,
  requestTimeoutMs: 15_000,
  deadlineMs: 16_000,
  longMs: LONG_MS,
};

/** The place of an engine: its address, where one process follows another. */
export interface Seat {
  readonly hostName: string;
  readonly tpSize: number;
  readonly blockSize: number;
  readonly skewMs: number;
  starts: number;
  engine: FaultEngine | undefined;
}

/**
 * Runs many requests through prefill and decode engines with different TP and block sizes, in
 * virtual time, with every kind of fault. The same seed gives exactly the same run.
 */
export function faultRun(options: FaultRunOptions): Promise<FaultRunReport> {
  const { plainProducers = false, rules, sabotage, wrapTransport, device, ...load } = options;
  const root = seededRandom(load.seed);
  const fixture = memoryFixture({
    random: root.fork("network"),
    rules: rules ?? (plainProducers ? PLAIN_FAULT_RULES : FAULT_RULES),
    plainProducers,
    sabotage,
    wrapTransport,
    device,
  });
  return faultRunOn(fixture, { ...load, plainProducers }, root);
}

/** Runs the same load on any fixture. */
export async function faultRunOn(
  fixture: FaultFixture,
  load: FaultLoad,
  root: SeededRandom = seededRandom(load.seed),
): Promise<FaultRunReport> {
  const { requests, plainProducers = false, atOnce = 0, numBlocks = 96, layerwise = false } = load;
  const { clients = 48, times = TIMES } = load;
  const { clock } = fixture;
  const startedMs = clock.now();
  const violations: string[] = [];
  let violationCount = 0;
  const violation = (what: string) => {
    violationCount += 1;
    if (violations.length < 10)
      violations.push(`at ${(clock.now() - startedMs).toFixed(1)} ms: ${what}`);
  };
  const outcomes: Record<string, number> = {};
  const seat = (hostName: string, tpSize: number, blockSize: number, skewMs: number): Seat => ({
    hostName,
    tpSize,
    blockSize,
    skewMs,
    starts: 0,
    engine: undefined,
  });
  const prefills = [seat("p0", 1, 16, 7_000_000), seat("p1", 2, 16, -3_000_000)];
  const decodes = [seat("d0", 1, 16, 0), seat("d1", 2, 32, 11_111)];
  const all = [...prefills, ...decodes];
  const deaths =
    load.deathEvery === undefined ? deathsByTime(clock) : deathsByRequests(load.deathEvery);
  let kills = 0;
  let taken = 0;

  async function start(place: Seat, random: SeededRandom): Promise<void> {
    place.starts += 1;
    // Half of the restarts keep the engine id, as an engine with a configured id does.
    const generation = !plainProducers && random.next() < 0.5 ? 0 : place.starts;
    const { hostName, tpSize, blockSize, skewMs } = place;
    place.engine = await fixture.start(
      {
        hostName,
        tpSize,
        blockSize,
        skewMs,
        numBlocks,
        layerwise,
        violation,
        engineId: `${hostName}-${generation}`,
        receiveDeadlineMs: times.deadlineMs,
        extra: {
          kv_lease_duration: times.leaseMs / 1000,
          request_timeout: times.requestTimeoutMs / 1000,
          engine_ttl: 30,
          push_layerwise: layerwise,
        },
        // When KV does not arrive, one decode engine computes it, and the other one fails the
        // request.
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
  const one = createFaultClient({
    clock,
    times,
    atOnce,
    plainProducers,
    violation,
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

  /** Repeatedly kills a random engine, and starts its successor later. */
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

  await fixture.settle(Promise.all(all.map((place) => start(place, root.fork(place.hostName)))));
  const served = Promise.all(
    Array.from({ length: clients }, (_, i) => client(root.fork(`client ${i}`))),
  );
  await fixture.settle(Promise.all([served.then(deaths.end), reaper(root.fork("reaper"))]));
  const left = await closeAll(fixture, all);
  return {
    violations,
    violationCount,
    outcomes,
    faults: fixture.faultCounts(),
    kills,
    seconds: Math.round((clock.now() - startedMs) / 1000),
    left,
  };
}

/**
 * Waits until the engines should hold nothing, and closes them. Returns the counts of what was
 * still held, before and after.
 */
export async function closeAll(
  fixture: FaultFixture,
  seats: readonly { readonly hostName: string; readonly engine: FaultEngine | undefined }[],
): Promise<Record<string, number>> {
  const left: Record<string, number> = {};
  const engines = seats.flatMap(({ engine }) => engine ?? []);
  // Blocks that an engine still keeps have a lease, and every lease ends.
  await fixture.waitUntilIdle(engines);
  for (const { engine, hostName } of seats) {
    for (const [name, count] of Object.entries((await engine?.outstanding()) ?? {})) {
      if (count !== 0) left[`${hostName}.${name}`] = count;
    }
  }
  await fixture.settle(Promise.all(engines.map((engine) => engine.close())));
  for (const [name, count] of Object.entries(await fixture.countHeld()))
    if (count !== 0) left[name] = count;
  return left;
}

function pick<T>(list: readonly T[], random: SeededRandom): T {
  return list[random.integer(list.length)] as T;
}
