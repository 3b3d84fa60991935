import { type Ambient, ambient, KvError } from "@kv/interface";
import { BlockPool } from "../headless/block-pool.js";
import type { Reach } from "../headless/headless-engine.js";
import { openMatchingDecode } from "../headless/matching-decode.js";
import { filterNotifications } from "../headless/notification-filter.js";
import type { EngineServer } from "../http/engine-server.js";
import { readRemotePrefill } from "../protocol/remote-prefill.js";
import { checkLeaks, type LeakReport, readUsedBlocks } from "./block-leaks.js";
import { type Fault, type PromptResult, PromptRunner } from "./prompt-runner.js";

/** Options of `load`. */
export interface LoadOptions extends Reach {
  readonly server: EngineServer;
  /** Lengths of the prompts, used in turn. */
  readonly promptTokens: readonly number[];
  readonly concurrency: number;
  /** Requests started per second. @default as many as `concurrency` permits */
  readonly ratePerSecond?: number | undefined;
  /** Ends the load after this time, in ms. */
  readonly durationMs?: number | undefined;
  /** Ends the load after this number of requests. @default 20, or no limit with `durationMs` */
  readonly requests?: number | undefined;
  /** Share of requests that are aborted during their READ, 0 to 1. @default 0 */
  readonly abortShare?: number | undefined;
  /** Share of requests whose READ P is not notified of, 0 to 1. @default 0 */
  readonly noNotifyShare?: number | undefined;
  /**
   * The server's `kv_lease_duration` in ms: after it, blocks of unnotified requests must be free.
   */
  readonly leaseMs: number;
  /**
   * How long the server may take to free the blocks of notified requests, in ms. @default 20_000
   */
  readonly freeWithinMs?: number | undefined;
  /** Added to the lease for the server's own timers, in ms. @default 10_000 */
  readonly leaseMarginMs?: number | undefined;
  /** Ends the load; the result covers the requests until then. */
  readonly signal?: AbortSignal | undefined;
  /** Called after each request with the number of finished ones. */
  readonly progress?: ((done: number) => void) | undefined;
}

/** The result of a load. */
export interface LoadResult {
  readonly engineId: string;
  readonly tpSize: number;
  /** Duration of the requests, without the wait for leases, in ms. */
  readonly elapsedMs: number;
  /** One entry per request, in the order in which they ended. */
  readonly pulls: readonly PromptResult[];
  /** Blocks that the server still holds; undefined when its metrics do not show them. */
  readonly leaks: LeakReport | undefined;
  /**
   * What the headless decode engine still held at the end, by name; a number other than zero (but
   * for `listeners`) is a defect here.
   */
  readonly outstanding: Readonly<Record<string, number>>;
}

const DEFAULT_REQUESTS = 20;
const FREE_WITHIN_MS = 20_000;
/** A READ from a local peer takes a few ms, so most aborts happen during it. */
const MAX_ABORT_AFTER_MS = 8;

/**
 * Sends prompts to a prefill server, receives their KV without a model, and checks which blocks the
 * server still holds afterwards. A first request, which is not counted, finds the server's cache.
 *
 * @throws those of this request and its handshake; later failures are part of the result.
 * `KV_CONFIG_INVALID` for a concurrency below 1.
 */
export async function load(options: LoadOptions): Promise<LoadResult> {
  const { server, concurrency, promptTokens } = options;
  const environment = ambient(options);
  const { clock, random } = environment;
  const before = await readUsedBlocks(server);

  // The longest prompt determines the size of the headless cache.
  const longest = Math.max(...promptTokens);
  const first = randomPrompt(longest, random);
  const params = await server.prefill(first);
  const remote = readRemotePrefill(params);
  const filter = filterNotifications(options.transport);
  const reach = { ...options, ...environment, transport: filter.transport };
  const matching = await openMatchingDecode(remote, concurrency, reach);
  const { decode, metadata } = matching;
  try {
    const pulls: PromptResult[] = [];
    const loadStartMs = clock.now();
    const pool = new BlockPool(matching.numBlocks);
    const runner = new PromptRunner({
      server,
      matching,
      pool,
      filter,
      clock,
      random,
      loadStartMs,
      signal: options.signal,
    });
    const isPush = remote.transferMode === "push";
    // P frees the blocks of the first request: a push P only after it has written them, a pull P
    // after a notification.
    if (isPush)
      await runner.receive({ prompt: first, fault: undefined, abortAfterMs: 0 }, params, remote);
    else
      decode.giveUpQueued({
        requestId: "kv-peer-first",
        numPromptTokens: longest,
        kvTransferParams: params,
      });
    await runConcurrently(options, clock, async (index) => {
      const length = promptTokens[index % promptTokens.length] ?? 1;
      const result = await runner.run({
        requestId: `kv-peer-${random.uuid()}`,
        prompt: randomPrompt(length, random),
        fault: chooseFault(random.next(), options),
        abortAfterMs: random.next() * MAX_ABORT_AFTER_MS,
      });
      pulls.push(result);
      options.progress?.(pulls.length);
    });
    const elapsedMs = clock.now() - loadStartMs;
    // A push P is not notified either when the request is aborted before its registration was sent.
    const unnotified = pulls.filter(
      ({ fault, outcome }) => fault === "no-notify" || (isPush && outcome === "aborted"),
    );
    const leaks = await checkLeaks({
      server,
      clock,
      before,
      unnotifiedBlocks: unnotified.reduce((sum, { serverBlocks }) => sum + serverBlocks, 0),
      leaseMs: options.leaseMs,
      freeWithinMs: options.freeWithinMs ?? FREE_WITHIN_MS,
      leaseMarginMs: options.leaseMarginMs,
    });
    return {
      engineId: metadata.engineId,
      tpSize: remote.tpSize,
      elapsedMs,
      pulls,
      leaks,
      outstanding: decode.outstanding(),
    };
  } finally {
    await decode.close();
  }
}

function chooseFault(
  chance: number,
  { abortShare = 0, noNotifyShare = 0 }: LoadOptions,
): Fault | undefined {
  if (chance < abortShare) return "abort";
  return chance < abortShare + noNotifyShare ? "no-notify" : undefined;
}

/**
 * Random ids that every vocabulary has. No two prompts are equal, so the prefix cache has none of
 * them.
 */
export function randomPrompt(tokens: number, random: Ambient["random"]): readonly number[] {
  return Array.from({ length: tokens }, () => 10 + Math.floor(random.next() * 900));
}

/**
 * Calls `work` with 0, 1, … at the requested rate and concurrency until the time, the number of
 * requests or the signal ends the load.
 */
async function runConcurrently(
  { concurrency, ratePerSecond, durationMs, requests, signal }: LoadOptions,
  clock: Ambient["clock"],
  work: (index: number) => Promise<void>,
): Promise<void> {
  const maxRequests =
    requests ?? (durationMs === undefined ? DEFAULT_REQUESTS : Number.POSITIVE_INFINITY);
  const startMs = clock.now();
  const endMs = durationMs === undefined ? Number.POSITIVE_INFINITY : startMs + durationMs;
  let started = 0;
  const isOver = () => clock.now() >= endMs || signal?.aborted === true;
  async function runOneAfterAnother(): Promise<void> {
    while (started < maxRequests && !isOver()) {
      const index = started++;
      if (ratePerSecond !== undefined) {
        const waitMs = startMs + (index * 1000) / ratePerSecond - clock.now();
        if (waitMs > 0)
          await new Promise<void>((resolve) => clock.setTimer(resolve, waitMs, { ref: true }));
        if (isOver()) return;
      }
      await work(index);
    }
  }
  if (concurrency < 1)
    throw new KvError("KV_CONFIG_INVALID", `concurrency is ${concurrency}; it must be at least 1`);
  await Promise.all(Array.from({ length: concurrency }, runOneAfterAnother));
}
