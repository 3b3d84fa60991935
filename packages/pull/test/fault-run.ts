import { type ConnectorModule, KvError, type KvTransferParams, type Transport } from "@kv/interface";
import {
  type FaultRule,
  memoryNetwork,
  type SeededRandom,
  seededRandom,
  virtualClock,
} from "@kv/transport-memory";
import { FAULT_RULES, LONG_MS, PLAIN_FAULT_RULES } from "./fault-rules.js";
import type { Sabotage } from "./sabotage.js";
import {
  coordinatesOf,
  createSimEngine,
  type SimDevice,
  type SimDeviceAround,
  type SimEngine,
  type SimRequest,
} from "./sim-engine.js";

export interface FaultRunOptions {
  readonly seed: string;
  readonly requests: number;
  /**
   * Producers that speak vLLM's protocol and nothing more. Then time alone tells whether blocks were kept, parameters are used once, and
   * a restarted producer has another engine id, as vLLM's has.
   */
  readonly plainProducers?: boolean;
  /** Breaks a rule on purpose: the run must find out. */
  readonly sabotage?: Sabotage;
  readonly wrapTransport?: (transport: Transport) => Transport;
  /** Pull by default. */
  readonly connector?: ConnectorModule;
  readonly rules?: readonly FaultRule[];
  /** The share of requests whose two legs go out at once, the consumer with the producer's coordinates alone. */
  readonly atOnce?: number;
  /** Of each engine: few enough that freed blocks are in use again soon. */
  readonly numBlocks?: number;
  /** `push_layerwise`, and engines that report a layer while they compute. */
  readonly layerwise?: boolean;
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
  readonly virtualSeconds: number;
  /** What is left when all is over and closed. */
  readonly left: Readonly<Record<string, number>>;
}

const LEASE_SECONDS = 6;
const REQUEST_TIMEOUT_MS = 15_000;
/** Of a decode request, from its submission: the timeout, what a transfer lingers, a few steps. */
const DEADLINE_MS = REQUEST_TIMEOUT_MS + 1000;
const CLIENTS = 48;

interface Seat {
  readonly hostName: string;
  readonly tpSize: number;
  readonly blockSize: number;
  readonly skewMs: number;
  starts: number;
  engine: SimEngine | undefined;
}

/**
 * Many requests through prefill and decode engines of different shapes, in virtual time, while everything that can go wrong does.
 * One seed is one run, down to the last byte.
 */
export async function faultRun({
  seed,
  requests,
  sabotage,
  wrapTransport,
  connector,
  rules,
  atOnce = 0,
  numBlocks = 96,
  plainProducers = false,
  layerwise = false,
  device,
}: FaultRunOptions): Promise<FaultRunReport> {
  const clock = virtualClock();
  const root = seededRandom(seed);
  const network = memoryNetwork({
    clock,
    random: root.fork("network"),
    latency: { latencyMs: 1, jitterMs: 3, minPieces: 3, lingerMs: 6 },
    faults: rules ?? (plainProducers ? PLAIN_FAULT_RULES : FAULT_RULES),
  });
  const violations: string[] = [];
  let violationCount = 0;
  const violation = (what: string) => {
    violationCount += 1;
    if (violations.length < 10) violations.push(`at ${clock.now().toFixed(1)} ms: ${what}`);
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
  let kills = 0;
  let taken = 0;

  async function start(place: Seat, random: SeededRandom): Promise<void> {
    place.starts += 1;
    // Half of the restarts keep the engine's id, as a configured one does.
    const generation = !plainProducers && random.next() < 0.5 ? 0 : place.starts;
    place.engine = await createSimEngine({
      network,
      hostName: place.hostName,
      engineId: `${place.hostName}-${generation}`,
      tpSize: place.tpSize,
      blockSize: place.blockSize,
      skewMs: place.skewMs,
      numBlocks,
      reportsLayers: layerwise,
      extra: {
        kv_lease_duration: LEASE_SECONDS,
        request_timeout: REQUEST_TIMEOUT_MS / 1000,
        engine_ttl: 30,
        push_layerwise: layerwise,
      },
      // One decode engine computes what did not arrive, the other fails it.
      loadFailurePolicy: place.hostName === "d1" ? "recompute" : "fail",
      violation,
      plain: plainProducers,
      ...(sabotage === undefined ? {} : { sabotage }),
      ...(wrapTransport === undefined ? {} : { wrapTransport }),
      ...(connector === undefined ? {} : { connector }),
      ...(device === undefined ? {} : { device: (around) => device(around, random.fork("device")) }),
    });
  }

  /** As a proxy that knows which of its engines are up. */
  async function living(seats: readonly Seat[], random: SeededRandom): Promise<Seat & { engine: SimEngine }> {
    for (;;) {
      const up = seats.filter(({ engine }) => engine !== undefined);
      if (up.length > 0) return pick(up, random) as Seat & { engine: SimEngine };
      await sleep(100);
    }
  }

  const sleep = (ms: number) => new Promise<void>((resolve) => void clock.setTimer(resolve, ms));

  /** One request of a client: prefill, the way of the parameters, decode; now and then a retry with the same parameters, or an abort. */
  async function one(n: number, random: SeededRandom): Promise<string> {
    const request: SimRequest = { requestId: `r${n}`, prompt: n, numTokens: 1 + random.integer(80) };
    const { engine: prefill } = await living(prefills, random);
    if (atOnce > 0 && random.next() < atOnce) return bothLegs(n, prefill, request, random);
    const params = await within(
      prefill.prefill(request),
      () => prefill.abort(request.requestId),
      random.next() < 0.03 ? random.next() * 20 : 30_000,
    );
    if (typeof params === "string") return params;
    await sleep(random.next() < 0.04 ? random.next() * LONG_MS : random.next() * 20);
    if (!plainProducers && random.next() < 0.02) {
      // Two decode engines are given the same blocks at once.
      const [, outcome] = await Promise.all([
        decode(request, params, `t${n}`, random),
        decode(request, params, `d${n}`, random),
      ]);
      return outcome;
    }
    const outcome = await decode(request, params, `d${n}`, random);
    if (outcome === "ok" || plainProducers || random.next() < 0.5) return outcome;
    await sleep(random.next() * 200);
    return decode(request, params, `u${n}`, random);
  }

  /** Both legs at once, or the consumer's first, or the producer's; either may be given up at any moment. */
  async function bothLegs(
    n: number,
    prefill: SimEngine,
    request: SimRequest,
    random: SeededRandom,
  ): Promise<string> {
    const suffix = () =>
      random
        .integer(2 ** 32)
        .toString(16)
        .padStart(8, "0");
    const prefillId = `cmpl-r${n}-0-${suffix()}`;
    const decodeId = `cmpl-r${n}-0-${suffix()}`;
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
    request: SimRequest,
    params: KvTransferParams,
    requestId: string,
    random: SeededRandom,
  ): Promise<string> {
    const { engine, blockSize } = await living(decodes, random);
    const hit = random.next() < 0.3 ? random.integer(4) * blockSize : 0;
    const startedMs = clock.now();
    const abortMs = random.next() < 0.06 ? random.next() ** 3 * 8000 : DEADLINE_MS + 60_000;
    const outcome = await within(
      engine.decode({ ...request, requestId, params, cachedTokens: Math.min(hit, request.numTokens) }),
      () => engine.abort(requestId),
      abortMs,
    );
    const tookMs = clock.now() - startedMs;
    if (tookMs > DEADLINE_MS) violation(`request ${requestId} ended only after ${tookMs} ms`);
    return typeof outcome === "string" ? outcome : "ok";
  }

  /** The outcome, or the code of the typed error; aborted after a while. */
  async function within<T>(work: Promise<T>, abort: () => void, abortMs: number): Promise<T | string> {
    const timer = clock.setTimer(abort, abortMs);
    try {
      return (await work) ?? ("ok" as never);
    } catch (error) {
      if (!KvError.is(error)) violation(`an error without a code: ${String(error)}`);
      return KvError.is(error) ? error.code : "untyped";
    } finally {
      timer.cancel();
    }
  }

  async function client(random: SeededRandom): Promise<void> {
    while (taken < requests) {
      taken += 1;
      const outcome = await one(taken, random.fork(`request ${taken}`));
      outcomes[outcome] = (outcomes[outcome] ?? 0) + 1;
    }
  }

  /** Kills an engine every so often and starts its successor after a while. */
  async function reaper(random: SeededRandom): Promise<void> {
    while (taken < requests) {
      await sleep(2000 + random.next() * 8000);
      const place = pick([...prefills, ...decodes], random);
      if (place.engine === undefined) continue;
      kills += 1;
      place.engine.kill();
      place.engine = undefined;
      await sleep(random.next() * 1500);
      await start(place, random);
    }
  }

  const all = [...prefills, ...decodes];
  await clock.settle(Promise.all(all.map((place) => start(place, root.fork(place.hostName)))));
  const work = [
    ...Array.from({ length: CLIENTS }, (_, i) => client(root.fork(`client ${i}`))),
    reaper(root.fork("reaper")),
  ];
  await clock.settle(Promise.all(work), { limitMs: 48 * 3_600_000 });
  // Whatever is still kept has a lease that ends.
  await clock.advance(30_000);
  const left: Record<string, number> = {};
  for (const { engine, hostName } of all) {
    for (const [name, count] of Object.entries(engine?.outstanding() ?? {})) {
      if (count !== 0) left[`${hostName}.${name}`] = count;
    }
  }
  await clock.settle(Promise.all(all.map(({ engine }) => engine?.close())));
  await clock.advance(10_000);
  for (const [name, count] of Object.entries(network.outstanding())) if (count !== 0) left[name] = count;
  if (clock.pendingTimers !== 0) left.timers = clock.pendingTimers;
  return {
    violations,
    violationCount,
    outcomes,
    faults: network.faultCounts() as Record<string, number>,
    kills,
    virtualSeconds: Math.round(clock.now() / 1000),
    left,
  };
}

function pick<T>(list: readonly T[], random: SeededRandom): T {
  return list[random.integer(list.length)] as T;
}
