import type { Clock, KvTransferParams } from "@kv/interface";
import type { SeededRandom } from "@kv/transport-memory";
import { coordinatesOf } from "../simulator/sim-engine.js";
import type { SimRequest } from "../simulator/sim-options.js";
import type { FaultEngine } from "./fault-fixture.js";
import type { Seat, Seats } from "./seats.js";

export interface FaultTimes {
  readonly leaseMs: number;
  readonly requestTimeoutMs: number;
  /**
   * Longest time that a decode request waits for its KV after it has blocks: the request timeout,
   * plus the time that a failed transfer can still write to memory, plus a few steps.
   */
  readonly deadlineMs: number;
  /** Longer than a lease: so late a message arrives after it has ended. */
  readonly longMs: number;
}

export interface FaultClientOptions {
  readonly clock: Clock;
  readonly times: FaultTimes;
  readonly seats: Seats;
  readonly prefills: readonly Seat[];
  readonly decodes: readonly Seat[];
  readonly atOnce: number;
  readonly plainProducers: boolean;
}

interface Living {
  readonly engine: FaultEngine;
  readonly blockSize: number;
}

export function idSuffix(random: SeededRandom): string {
  return random
    .integer(2 ** 32)
    .toString(16)
    .padStart(8, "0");
}

/** Sends requests, aborts them at any moment, retries them, and sends some of them twice. */
export function createFaultClient(
  options: FaultClientOptions,
): (n: number, random: SeededRandom) => Promise<string> {
  const { clock, times, seats, prefills, decodes, atOnce, plainProducers } = options;
  const { longMs, deadlineMs } = times;
  const { sleep } = seats;

  /** A random engine that runs, as a proxy knows it. Waits while none runs. */
  async function living(places: readonly Seat[], random: SeededRandom): Promise<Living> {
    for (;;) {
      const up = places.flatMap(({ engine, blockSize }) => (engine ? { engine, blockSize } : []));
      const one = up.length === 0 ? undefined : up[random.integer(up.length)];
      if (one !== undefined) return one;
      await sleep(100);
    }
  }

  /** Prefill, a delay, and decode. Sometimes aborts, or retries with the same parameters. */
  async function one(n: number, random: SeededRandom): Promise<string> {
    const request = { requestId: `r${n}`, prompt: n, numTokens: 1 + random.integer(80) };
    const { engine: prefill } = await living(prefills, random);
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
    // A vLLM P frees the blocks with the first engine that has read them: only requests of one D
    // may share them.
    const at = plainProducers ? await living(decodes, random) : undefined;
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

  /** Starts both legs at once, or one up to 50 ms before the other. Either may be aborted. */
  async function bothLegs(
    n: number,
    prefill: FaultEngine,
    request: SimRequest,
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
    request: SimRequest,
    params: KvTransferParams,
    requestId: string,
    random: SeededRandom,
    at?: Living,
  ): Promise<string> {
    const { engine, blockSize } = at ?? (await living(decodes, random));
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
    // It may first have waited for blocks that others held until their own deadlines.
    if (tookMs > 3 * deadlineMs)
      seats.violation(`request ${requestId} ended only after ${tookMs} ms`);
    return outcome;
  }

  async function within(
    work: Promise<unknown>,
    abort: () => void,
    abortMs: number,
  ): Promise<string> {
    const timer = clock.setTimer(abort, abortMs);
    const outcome = await seats.outcomeOf(work);
    timer.cancel();
    return outcome;
  }

  return one;
}
