import type { ConnectorModule } from "@kv/interface";
import { type SeededRandom, seededRandom } from "@kv/transport-memory";
import { createFaultClient, type FaultTimes } from "./fault-client.js";
import { deathsByRequests, deathsByTime } from "./fault-deaths.js";
import { type FaultFixture, type MemoryFixtureOptions, memoryFixture } from "./fault-fixture.js";
import { FAULT_RULES, LONG_MS, PLAIN_FAULT_RULES } from "./fault-rules.js";
import { Seats, seat } from "./seats.js";

export interface FaultLoad extends Pick<MemoryFixtureOptions, "plainProducers"> {
  readonly seed: string;
  readonly requests: number;
  readonly connector?: ConnectorModule;
  /** Fraction of requests whose two legs start at once. */
  readonly atOnce?: number;
  /** Blocks of each engine: few, so that freed blocks are allocated again soon. */
  readonly numBlocks?: number;
  readonly layerwise?: boolean;
  readonly clients?: number;
  readonly times?: FaultTimes;
  /**
   * An engine dies each time that clients have taken so many requests. Default: at times of the
   * clock.
   */
  readonly deathEvery?: number;
}

export interface FaultRunOptions extends FaultLoad, MemoryFixtureOptions {}

export interface FaultRunReport extends Pick<Seats, "violations" | "violationCount" | "outcomes"> {
  readonly faults: Readonly<Record<string, number>>;
  readonly kills: number;
  readonly seconds: number;
  /** What is still held after all requests ended, and after all engines are closed. */
  readonly left: Readonly<Record<string, number>>;
}

const TIMES: FaultTimes = {
  leaseMs: 6000,
  requestTimeoutMs: 15_000,
  deadlineMs: 16_000,
  longMs: LONG_MS,
};

/**
 * Runs many requests through prefill and decode engines with different TP and block sizes, in
 * virtual time, with every kind of fault. The same seed gives exactly the same run.
 */
export function faultRun(options: FaultRunOptions): Promise<FaultRunReport> {
  const { plainProducers = false, rules = plainProducers ? PLAIN_FAULT_RULES : FAULT_RULES } =
    options;
  const root = seededRandom(options.seed);
  return faultRunOn(memoryFixture(root.fork("network"), { ...options, rules }), options, root);
}

export async function faultRunOn(
  fixture: FaultFixture,
  load: FaultLoad,
  root: SeededRandom = seededRandom(load.seed),
): Promise<FaultRunReport> {
  const { requests, plainProducers = false, atOnce = 0, numBlocks = 96, layerwise = false } = load;
  const { clients = 48, times = TIMES, connector } = load;
  const { clock } = fixture;
  const startedMs = clock.now();
  const seats = new Seats(fixture, {
    numBlocks,
    layerwise,
    receiveDeadlineMs: times.deadlineMs,
    extra: {
      kv_lease_duration: times.leaseMs / 1000,
      request_timeout: times.requestTimeoutMs / 1000,
      engine_ttl: 30,
      push_layerwise: layerwise,
    },
    ...(connector === undefined ? {} : { connector }),
  });
  const prefills = [seat("p0", 1, 16, 7_000_000), seat("p1", 2, 16, -3_000_000)];
  const decodes = [seat("d0", 1), seat("d1", 2, 32, 11_111)];
  const all = [...prefills, ...decodes];
  const deaths =
    load.deathEvery === undefined ? deathsByTime(clock) : deathsByRequests(load.deathEvery);
  const one = createFaultClient({
    clock,
    times,
    seats,
    prefills,
    decodes,
    atOnce,
    plainProducers,
  });
  let kills = 0;
  let taken = 0;

  async function client(random: SeededRandom): Promise<void> {
    while (taken < requests) {
      await deaths.mayTake(taken);
      if (taken >= requests) return;
      taken += 1;
      seats.ended(await one(taken, random.fork(`request ${taken}`)));
    }
  }

  async function reaper(random: SeededRandom): Promise<void> {
    while (taken < requests) {
      await deaths.next(random);
      if (deaths.ended) return;
      const place = all[random.integer(all.length)];
      if (place?.engine === undefined) continue;
      kills += 1;
      await seats.kill(place);
      await deaths.mourn(random);
      await seats.start(place, random, plainProducers);
      deaths.over();
    }
  }

  const starts = all.map((place) => seats.start(place, root.fork(place.hostName), plainProducers));
  await fixture.settle(Promise.all(starts));
  const served = Promise.all(
    Array.from({ length: clients }, (_, i) => client(root.fork(`client ${i}`))),
  );
  await fixture.settle(Promise.all([served.then(deaths.end), reaper(root.fork("reaper"))]));
  const left = await seats.close(all);
  const { violations, violationCount, outcomes } = seats;
  const seconds = Math.round((clock.now() - startedMs) / 1000);
  return {
    violations,
    violationCount,
    outcomes,
    faults: fixture.faultCounts(),
    kills,
    seconds,
    left,
  };
}
