import type { ConnectorModule, KvTransferParams } from "@kv/interface";
import { type SeededRandom, seededRandom } from "@kv/transport-memory";
import { coordinatesOf } from "../simulator/sim-engine.js";
import type { EngineRequest } from "../simulator/sim-options.js";
import { type FaultFixture, type MemoryFixtureOptions, memoryFixture } from "./fault-fixture.js";
import { FAULT_RULES, LONG_MS, PLAIN_FAULT_RULES } from "./fault-rules.js";
import { idSuffix, Seats, seat } from "./seats.js";

export interface FaultLoad extends Pick<MemoryFixtureOptions, "plainProducers"> {
  readonly seed: string;
  readonly requests: number;
  readonly connector?: ConnectorModule;
  /** Fraction of requests whose two legs start at once. */
  readonly atOnce?: number;
  /** Few, so that freed blocks are allocated again soon. */
  readonly numBlocks?: number;
  readonly layerwise?: boolean;
  readonly clients?: number;
  readonly times?: typeof TIMES;
  /** An engine dies after so many more requests. Default: at times of the clock. */
  readonly deathEvery?: number;
}

export interface FaultRunOptions extends FaultLoad, MemoryFixtureOptions {}

const TIMES = {
  leaseMs: 6000,
  requestTimeoutMs: 15_000,
  /**
   * The request timeout, the time that a failed transfer can still write to memory, and a few
   * steps.
   */
  deadlineMs: 16_000,
  /** Longer than a lease. */
  longMs: LONG_MS,
};

/**
 * Engines with different TP and block sizes, in virtual time, with every kind of fault. The same
 * seed gives the same run.
 */
export function faultRun(options: FaultRunOptions) {
  const { plainProducers = false, rules = plainProducers ? PLAIN_FAULT_RULES : FAULT_RULES } =
    options;
  const root = seededRandom(options.seed);
  return faultRunOn(memoryFixture(root.fork("network"), { ...options, rules }), options, root);
}

export async function faultRunOn(
  fixture: FaultFixture,
  load: FaultLoad,
  root: SeededRandom = seededRandom(load.seed),
) {
  const { requests, plainProducers = false, numBlocks = 96, layerwise = false } = load;
  const { clients = 48, times = TIMES, connector, deathEvery } = load;
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
    connector,
  });
  const prefills = [seat("p0", 1, 16, 7_000_000), seat("p1", 2, 16, -3_000_000)];
  const decodes = [seat("d0", 1), seat("d1", 2, 32, 11_111)];
  const all = [...prefills, ...decodes];
  const deaths = deathEvery === undefined ? undefined : new DeathsByRequests(deathEvery);
  const one = faultClient(load, seats, prefills, decodes);
  let kills = 0;
  let taken = 0;

  async function client(random: SeededRandom) {
    while (taken < requests) {
      await deaths?.mayTake(taken);
      if (taken >= requests) return;
      taken += 1;
      seats.ended(await one(taken, random.fork(`request ${taken}`)));
    }
  }

  /** By the clock an engine dies every 2 to 10 s. */
  async function reaper(random: SeededRandom) {
    while (taken < requests) {
      await (deaths?.next() ?? seats.sleep(2000 + random.next() * 8000));
      if (deaths?.ended) return;
      const place = all[random.integer(all.length)];
      if (place?.engine === undefined) continue;
      kills += 1;
      await seats.kill(place);
      if (deaths === undefined) await seats.sleep(random.next() * 1500);
      await seats.start(place, random, plainProducers);
      deaths?.over();
    }
  }

  const starts = all.map((place) => seats.start(place, root.fork(place.hostName), plainProducers));
  await fixture.settle(Promise.all(starts));
  const served = Promise.all(
    Array.from({ length: clients }, (_, i) => client(root.fork(`client ${i}`))),
  );
  await fixture.settle(
    Promise.all([served.then(() => deaths?.end()), reaper(root.fork("reaper"))]),
  );
  /** After all requests ended, and after all engines are closed. */
  const left = await seats.close(all);
  const { violations, violationCount, outcomes } = seats;
  const seconds = Math.round((clock.now() - startedMs) / 1000);
  const faults = fixture.faultCounts();
  return { violations, violationCount, outcomes, faults, kills, seconds, left };
}

/** Aborts requests at any moment, retries them, and sends some twice. */
function faultClient(
  { atOnce = 0, plainProducers, times = TIMES }: FaultLoad,
  seats: Seats,
  prefills: Parameters<Seats["living"]>[0],
  decodes: typeof prefills,
) {
  const { longMs, deadlineMs } = times;
  const { clock, sleep } = seats;

  async function one(n: number, random: SeededRandom): Promise<string> {
    const request = { requestId: `r${n}`, prompt: n, numTokens: 1 + random.integer(80) };
    const { engine: prefill } = await seats.living(prefills, random);
    if (atOnce > 0 && random.next() < atOnce) return bothLegs(n, prefill, request, random);
    const work = prefill.prefill(request);
    const prefilled = await within(
      work,
      () => prefill.abort(request.requestId),
      random.next() < 0.03 ? random.next() * 20 : 30_000,
    );
    if (prefilled !== "ok") return prefilled;
    const params = await work;
    await sleep(random.next() < 0.04 ? random.next() * longMs : random.next() * 20);
    // A vLLM P frees the blocks with the first engine that has read them.
    const at = plainProducers ? await seats.living(decodes, random) : undefined;
    if (random.next() < 0.02) {
      const [, outcome] = await Promise.all([
        decode(request, params, `t${n}`, random, at),
        decode(request, params, `d${n}`, random, at),
      ]);
      return outcome;
    }
    const outcome = await decode(request, params, `d${n}`, random, at);
    if (random.next() < 0.5) return outcome;
    await sleep(random.next() * 200);
    const again = await decode(request, params, `u${n}`, random, at);
    return outcome === "ok" ? outcome : again;
  }

  async function bothLegs(
    n: number,
    prefill: Awaited<ReturnType<Seats["living"]>>["engine"],
    request: EngineRequest,
    random: SeededRandom,
  ): Promise<string> {
    const prefillId = `cmpl-r${n}-0-${idSuffix(random)}`;
    const decodeId = `cmpl-r${n}-0-${idSuffix(random)}`;
    const abortMs = random.next() < 0.05 ? random.next() ** 2 * 4000 : 60_000;
    const leadMs = random.next() < 0.3 ? random.next() * 50 : 0;
    const prefillFirst = random.next() < 0.5;
    const [outcome] = await Promise.all([
      sleep(prefillFirst ? leadMs : 0).then(() =>
        decode(request, coordinatesOf(prefill, `r${n}`), decodeId, random),
      ),
      sleep(prefillFirst ? 0 : leadMs).then(() =>
        within(
          prefill.prefill({ ...request, requestId: prefillId }),
          () => prefill.abort(prefillId),
          abortMs,
        ),
      ),
    ]);
    return outcome;
  }

  async function decode(
    request: EngineRequest,
    params: KvTransferParams,
    requestId: string,
    random: SeededRandom,
    at?: Awaited<ReturnType<Seats["living"]>>,
  ): Promise<string> {
    const { engine, blockSize } = at ?? (await seats.living(decodes, random));
    const hit = random.next() < 0.3 ? random.integer(4) * blockSize : 0;
    const startedMs = clock.now();
    const abortMs = random.next() < 0.06 ? random.next() ** 3 * 8000 : deadlineMs + 60_000;
    const cachedTokens = Math.min(hit, request.numTokens);
    const outcome = await within(
      engine.decode({ ...request, requestId, params, cachedTokens }),
      () => engine.abort(requestId),
      abortMs,
    );
    const tookMs = clock.now() - startedMs;
    // It may first have waited for blocks that others held.
    if (tookMs > 3 * deadlineMs)
      seats.violation(`request ${requestId} ended only after ${tookMs} ms`);
    return outcome;
  }

  async function within(work: Promise<unknown>, abort: () => void, abortMs: number) {
    const timer = clock.setTimer(abort, abortMs);
    const outcome = await seats.outcomeOf(work);
    timer.cancel();
    return outcome;
  }

  return one;
}

/**
 * Clients take at most half of `every` requests before a successor has started: the number of
 * deaths is the same on any machine.
 */
class DeathsByRequests {
  readonly #every: number;
  #point: number;
  #taken = 0;
  #wake: (() => void) | undefined;
  #waiting: (() => void)[] = [];
  ended = false;

  constructor(every: number) {
    this.#every = every;
    this.#point = every;
  }

  /** Waits while no client may take its next request. */
  mayTake(taken: number): Promise<void> | void {
    this.#taken = taken;
    if (taken >= this.#point) this.#wake?.();
    if (taken < this.#point + this.#every / 2) return;
    return new Promise((resolve) => void this.#waiting.push(resolve));
  }

  async next(): Promise<void> {
    if (this.#taken < this.#point && !this.ended)
      await new Promise<void>((resolve) => {
        this.#wake = resolve;
      });
    this.#wake = undefined;
  }

  over(): void {
    this.#point += this.#every;
    for (const resolve of this.#waiting.splice(0)) resolve();
  }

  end(): void {
    this.ended = true;
    this.#wake?.();
  }
}
