import { type Ambient, ambient, KvError, type KvErrorCode } from "@kv/interface";
import { BlockPool, splitByGroup } from "../headless/block-pool.js";
import { UNWRITTEN_BYTE } from "../headless/headless-decode.js";
import type { Reach } from "../headless/headless-engine.js";
import {
  decodeRequest,
  filterNotifications,
  type MatchingDecode,
  type NotificationFilter,
  openMatchingDecode,
  type PrefilledPrompt,
  prefillPrompt,
} from "../headless/matching-decode.js";
import type { EngineServer } from "../http/engine-server.js";
import { countRemoteBlocks } from "../protocol/remote-engine.js";
import { checkLeaks, type LeakReport, readUsedBlocks, sleep } from "./block-leaks.js";

/** Options of `load`. */
export interface LoadOptions extends Reach {
  readonly server: EngineServer;
  /** Used in turn. */
  readonly promptTokens: readonly number[];
  readonly concurrency: number;
  /** Starts per second. @default as many as `concurrency` permits */
  readonly ratePerSecond?: number | undefined;
  readonly durationMs?: number | undefined;
  /** @default 20, or no limit with `durationMs` */
  readonly requests?: number | undefined;
  /** Requests aborted during their READ, 0 to 1. @default 0 */
  readonly abortShare?: number | undefined;
  /** Requests without a notification to P, 0 to 1. @default 0 */
  readonly noNotifyShare?: number | undefined;
  /** The server's `kv_lease_duration` in ms. */
  readonly leaseMs: number;
  /** Time for the server to free notified requests' blocks, in ms. @default 20_000 */
  readonly freeWithinMs?: number | undefined;
  /** Time for the server's timers after a lease, in ms. @default 10_000 */
  readonly leaseMarginMs?: number | undefined;
  /** The result covers the requests until then. */
  readonly signal?: AbortSignal | undefined;
  /** Gets the number of finished requests. */
  readonly progress?: ((done: number) => void) | undefined;
}

/** The result of a load. */
export interface LoadResult {
  readonly engineId: string;
  readonly tpSize: number;
  readonly elapsedMs: number;
  readonly pulls: readonly PromptResult[];
  /** Undefined when the server's metrics do not show its blocks. */
  readonly leaks: LeakReport | undefined;
  /** The headless D's counts by name; zeros but for `listeners`. */
  readonly outstanding: Readonly<Record<string, number>>;
}

const DEFAULT_REQUESTS = 20;
const FREE_WITHIN_MS = 20_000;
/** Below the time that a program has after Ctrl-C. */
const LEG_GRACE_MS = 400;
/** A local READ takes a few ms, so most aborts happen during it. */
const MAX_ABORT_AFTER_MS = 8;

/**
 * Sends prompts to a prefill server, receives their KV, and checks which blocks the server still
 * holds. A first request, which does not count, shows the server's cache.
 *
 * @throws those of this request and its handshake; later failures are part of the result.
 * `KV_CONFIG_INVALID` for a concurrency below 1.
 */
export async function load(options: LoadOptions): Promise<LoadResult> {
  const { server, concurrency, promptTokens, signal } = options;
  const { clock, random } = ambient(options);
  const before = await readUsedBlocks(server);

  const longest = Math.max(...promptTokens);
  const first = await prefillPrompt(server, randomPrompt(longest, random));
  const { remote } = first;
  const filter = filterNotifications(options.transport);
  const reach = { ...options, clock, random, transport: filter.transport };
  const matching = await openMatchingDecode(remote, concurrency, reach);
  await using decode = matching.decode;
  const pulls: PromptResult[] = [];
  const loadStartMs = clock.now();
  const pool = new BlockPool(matching.numBlocks);
  // An answer on its way brings the blocks that P keeps, so legs get a while to end.
  const legs = new AbortController();
  const abortLegs = () => legs.abort(signal?.reason);
  signal?.addEventListener("abort", () => void clock.setTimer(abortLegs, LEG_GRACE_MS));
  const runner = new PromptRunner({
    server,
    matching,
    pool,
    filter,
    clock,
    random,
    loadStartMs,
    signal: legs.signal,
  });
  const isPush = remote.transferMode === "push";
  // A push P frees the blocks after writing them, a pull P after a notification.
  if (isPush) await runner.receive(first);
  else
    decode.giveUpQueued({
      requestId: "kv-peer-first",
      numPromptTokens: longest,
      kvTransferParams: first.params,
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
  // A push P hears nothing of a request aborted before its registration, either.
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
  const { engineId } = matching.metadata;
  const outstanding = decode.outstanding();
  return { engineId, tpSize: remote.tpSize, elapsedMs, pulls, leaks, outstanding };
}

function chooseFault(
  chance: number,
  { abortShare = 0, noNotifyShare = 0 }: LoadOptions,
): Fault | undefined {
  if (chance < abortShare) return "abort";
  return chance < abortShare + noNotifyShare ? "no-notify" : undefined;
}

/** No prefix cache has random prompts. */
export function randomPrompt(tokens: number, random: Ambient["random"]): readonly number[] {
  return Array.from({ length: tokens }, () => 10 + Math.floor(random.next() * 900));
}

async function runConcurrently(
  { concurrency, ratePerSecond, durationMs, requests, signal }: LoadOptions,
  clock: Ambient["clock"],
  work: (index: number) => Promise<void>,
): Promise<void> {
  if (concurrency < 1)
    throw new KvError("KV_CONFIG_INVALID", `concurrency is ${concurrency}; it must be at least 1`);
  const maxRequests =
    requests ?? (durationMs === undefined ? DEFAULT_REQUESTS : Number.POSITIVE_INFINITY);
  const startMs = clock.now();
  const endMs = startMs + (durationMs ?? Number.POSITIVE_INFINITY);
  let started = 0;
  const isOver = () => clock.now() >= endMs || signal?.aborted === true;
  async function runOneAfterAnother(): Promise<void> {
    while (started < maxRequests && !isOver()) {
      const index = started++;
      if (ratePerSecond !== undefined) {
        const waitMs = startMs + (index * 1000) / ratePerSecond - clock.now();
        if (waitMs > 0) await sleep(clock, waitMs);
        if (isOver()) return;
      }
      await work(index);
    }
  }
  await Promise.all(Array.from({ length: concurrency }, runOneAfterAnother));
}

/**
 * A deliberate fault. `abort`: during the READ. `no-notify`: P does not hear of the READ, as when D
 * dies.
 */
export type Fault = "abort" | "no-notify";

/** How one prompt of a load ended. */
export interface PromptResult {
  readonly outcome: "ok" | "aborted" | "failed";
  readonly fault: Fault | undefined;
  readonly code: KvErrorCode | undefined;
  readonly message: string | undefined;
  readonly startMs: number;
  /** Until the answer with `kv_transfer_params`; 0 without one. */
  readonly prefillMs: number;
  /** From that answer to the KV; undefined when it did not arrive. */
  readonly pullMs: number | undefined;
  readonly promptTokens: number;
  readonly lengthBytes: number;
  /** P keeps them until a notification or the lease's end. */
  readonly serverBlocks: number;
}

interface PromptOrder {
  readonly requestId: string;
  readonly prompt: readonly number[];
  readonly fault: Fault | undefined;
  readonly abortAfterMs: number;
}

interface PromptRunnerOptions extends Pick<Ambient, "clock" | "random"> {
  readonly server: EngineServer;
  readonly matching: Pick<MatchingDecode, "decode" | "metadata" | "settings">;
  readonly pool: BlockPool;
  readonly filter: Pick<NotificationFilter, "drop">;
  readonly loadStartMs: number;
  readonly signal?: AbortSignal | undefined;
}

const EDGE_BYTES = 64;

export class PromptRunner {
  readonly #options: PromptRunnerOptions;

  constructor(options: PromptRunnerOptions) {
    this.#options = options;
  }

  async run(order: PromptOrder): Promise<PromptResult> {
    const { server, clock, filter, loadStartMs, signal } = this.#options;
    const { requestId, prompt, fault } = order;
    const sentMs = clock.now();
    const result = {
      fault,
      code: undefined,
      message: undefined,
      startMs: sentMs - loadStartMs,
      prefillMs: 0,
      pullMs: undefined,
      promptTokens: prompt.length,
      lengthBytes: 0,
      serverBlocks: 0,
    };
    try {
      const prefilled = await prefillPrompt(server, prompt, { requestId, signal });
      result.prefillMs = clock.now() - sentMs;
      const { remote } = prefilled;
      result.serverBlocks = countRemoteBlocks(remote);
      if (fault === "no-notify") {
        // Without a registration, a pushing P keeps the blocks until the lease ends.
        if (remote.transferMode === "push") return { ...result, outcome: "ok" };
        filter.drop(remote.remoteRequestId);
      }
      const readMs = clock.now();
      const abortAfterMs = fault === "abort" ? order.abortAfterMs : undefined;
      if (await this.receive(prefilled, abortAfterMs)) return { ...result, outcome: "aborted" };
      const lengthBytes = result.serverBlocks * this.#blockLengthBytes();
      return { ...result, outcome: "ok", pullMs: clock.now() - readMs, lengthBytes };
    } catch (thrown) {
      if (signal?.aborted === true && thrown === signal.reason)
        return { ...result, outcome: "aborted" };
      const { code, message } = KvError.from(thrown, "KV_INTERNAL", "a request failed");
      return { ...result, outcome: "failed", code, message };
    }
  }

  #blockLengthBytes(): number {
    const { decode, metadata, settings } = this.#options.matching;
    const kernelBytes = settings.regions.reduce((sum, each) => sum + each.blockLengthBytes, 0);
    return kernelBytes * metadata.physicalBlocksPerLogical * decode.tpSize;
  }

  /**
   * True for a request that was aborted after `abortAfterMs`.
   *
   * @throws those of the transfer; `KV_TRANSFER_FAILED` when a block was not written.
   */
  async receive(prompt: PrefilledPrompt, abortAfterMs?: number): Promise<boolean> {
    const { matching, pool, clock, random } = this.#options;
    const { decode } = matching;
    const { remote } = prompt;
    const request = decodeRequest(prompt, random);
    const lengths = remote.remoteBlockIds.map((ids) => ids.length);
    const taken = await pool.take(countRemoteBlocks(remote));
    const blockIds = splitByGroup(taken, lengths);
    const abort = new AbortController();
    const { signal } = abort;
    const timer =
      abortAfterMs === undefined
        ? undefined
        : clock.setTimer(() => abort.abort(), abortAfterMs, { ref: true });
    try {
      for (const edge of this.#blockEdges(taken)) edge.fill(UNWRITTEN_BYTE);
      const { failure, aborted } = await decode.receive(request, blockIds, { signal });
      if (!aborted) decode.finish(request, blockIds);
      if (failure !== undefined && failure.code !== "KV_REQUEST_ABORTED")
        throw new KvError(failure.code, failure.message);
      if (!aborted) this.#checkWritten(taken);
      return aborted;
    } finally {
      timer?.cancel();
      pool.give(taken);
    }
  }

  *#blockEdges(ids: readonly number[]): Generator<Uint8Array> {
    const { decode, metadata, settings } = this.#options.matching;
    const kernels = metadata.physicalBlocksPerLogical;
    const kernelIds = ids.flatMap((id) =>
      Array.from({ length: kernels }, (_, kernel) => id * kernels + kernel),
    );
    for (let tpRank = 0; tpRank < decode.tpSize; tpRank++)
      for (const region of settings.regions.keys())
        for (const id of kernelIds) {
          const block = decode.block(tpRank, region, id);
          yield block.subarray(0, EDGE_BYTES);
          yield block.subarray(-EDGE_BYTES);
        }
  }

  #checkWritten(ids: readonly number[]): void {
    const unwritten = Array.from(this.#blockEdges(ids)).filter((edge) =>
      edge.every((byte) => byte === UNWRITTEN_BYTE),
    ).length;
    if (unwritten === 0) return;
    throw new KvError(
      "KV_TRANSFER_FAILED",
      `the transfer was reported as complete, but ${unwritten} block edges were not written`,
      { hint: "compare the NIXL versions of both sides, run kv-peer doctor" },
    );
  }
}
