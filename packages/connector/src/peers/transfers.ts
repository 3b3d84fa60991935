import type {
  Agent,
  Clock,
  Metrics,
  Span,
  SpanOptions,
  Tracer,
  TransferRequest,
  TransferResult,
} from "@kv/interface";
import { METRICS } from "../metrics/memory-metrics.js";

const COUNTERS = [
  METRICS.failedTransfers,
  METRICS.failedNotifications,
  METRICS.expiredRequests,
  METRICS.notificationsAfterExpiry,
  METRICS.ignoredNotifications,
];

/** A worker's metrics, under vLLM 0.33's names (`v1/nixl/stats.py`). */
export class TransferMetrics {
  readonly #metrics: Metrics;

  constructor(metrics: Metrics) {
    this.#metrics = metrics;
    // As in vLLM: without a first sample of 0, `increase()` misses the first event.
    for (const name of COUNTERS) metrics.count(name, 0);
  }

  transferred({ transferMs, postMs, lengthBytes, descriptorCount }: TransferResult): void {
    this.#metrics.observe(METRICS.transferSeconds, transferMs / 1000);
    this.#metrics.observe(METRICS.postSeconds, postMs / 1000);
    this.#metrics.observe(METRICS.bytesTransferred, lengthBytes);
    this.#metrics.observe(METRICS.descriptors, descriptorCount);
  }

  transferFailed(): void {
    this.#metrics.count(METRICS.failedTransfers);
  }

  handshakeFailed(): void {
    this.#metrics.count(METRICS.failedTransfers);
  }

  notificationFailed(): void {
    this.#metrics.count(METRICS.failedNotifications);
  }

  leaseExpired(): void {
    this.#metrics.count(METRICS.expiredRequests);
  }

  notificationIgnored(): void {
    this.#metrics.count(METRICS.ignoredNotifications);
  }

  notificationAfterExpiry(): void {
    this.#metrics.count(METRICS.notificationsAfterExpiry);
  }
}

/** Turns the first failure into the request's error. `isStarted`: the transfer had begun. */
export type TransferFailed = (error: unknown, isStarted: boolean) => unknown;

export interface RequestTransfers {
  /** Does nothing after a failure. Resolves when memory is no longer touched; never rejects. */
  start(request: TransferRequest, failed?: TransferFailed): Promise<void>;
  fail(error: unknown): void;
  readonly hasFailed: boolean;
}

/**
 * Runs a request's transfers. A failure aborts the others; settles when none touches memory.
 * @throws The first failure.
 */
export async function transferAll(
  {
    agent,
    metrics,
    tracer,
  }: {
    readonly agent: Agent;
    readonly metrics: TransferMetrics;
    readonly tracer?: Tracer | undefined;
  },
  { signal, parent }: { readonly signal: AbortSignal; readonly parent: string | undefined },
  run: (transfers: RequestTransfers) => Promise<unknown>,
): Promise<void> {
  const abort = new AbortController();
  const onAbort = () => abort.abort(signal.reason);
  signal.addEventListener("abort", onAbort);
  let failure: { readonly error: unknown } | undefined;
  await run({
    get hasFailed() {
      return failure !== undefined;
    },
    fail(error) {
      failure ??= { error };
      abort.abort(error);
    },
    async start(request, failed = (error) => error) {
      if (failure !== undefined) return;
      const fail = (error: unknown, isStarted: boolean) => {
        failure ??= { error: failed(error, isStarted) };
        abort.abort(error);
      };
      const span = tracer?.start(request.operation === "READ" ? "kv.read" : "kv.write", {
        parent,
        attributes: { "kv.backend": agent.backends[0], "kv.remote_agent": request.remote.remote },
      });
      try {
        const { done, released } = agent.transfer({ ...request, signal: abort.signal });
        const ended = done.then(
          (result) => {
            metrics.transferred(result);
            span?.set({
              "kv.bytes": result.lengthBytes,
              "kv.descriptors": result.descriptorCount,
              "kv.merged_descriptors": result.mergedCount,
              "kv.prepare_ms": result.prepareMs,
              "kv.post_ms": result.postMs,
              "kv.transfer_ms": result.transferMs,
            });
            span?.end();
          },
          (error: unknown) => {
            span?.end(error);
            fail(error, true);
          },
        );
        await Promise.all([ended, released]);
      } catch (error) {
        span?.end(error);
        fail(error, false);
      }
    },
  });
  signal.removeEventListener("abort", onAbort);
  if (failure !== undefined) throw (failure as { readonly error: unknown }).error;
}

/** Background work that only closing waits for. */
export class TaskTracker {
  readonly #tasks = new Set<Promise<unknown>>();

  /** `work` must never reject. */
  track(work: Promise<unknown>): void {
    const tracked = work.finally(() => this.#tasks.delete(tracked));
    this.#tasks.add(tracked);
  }

  get size(): number {
    return this.#tasks.size;
  }

  /** Waits for tasks that are added meanwhile, too. */
  async idle(): Promise<void> {
    while (this.#tasks.size > 0) await Promise.all(this.#tasks);
  }
}

/** A transfer may hang on a dead peer; closing the agent ends it. */
export const CLOSE_GRACE_MS = 10_000;

/** False when `CLOSE_GRACE_MS` ran out. */
export async function idleWithinGrace(
  clock: Clock,
  parts: readonly Pick<TaskTracker, "size" | "idle">[],
): Promise<boolean> {
  let isLate = false;
  let stop = () => {};
  const grace = new Promise<void>((resolve) => {
    stop = resolve;
  });
  const timer = clock.setTimer(() => {
    isLate = true;
    stop();
  }, CLOSE_GRACE_MS);
  while (!isLate && parts.some(({ size }) => size > 0))
    await Promise.race([Promise.all(parts.map((part) => part.idle())), grace]);
  timer.cancel();
  return !isLate;
}

/** The span ends with `work` or with its promise. */
export function traced<T>(
  tracer: Tracer | undefined,
  name: string,
  options: SpanOptions,
  work: (span: Span | undefined) => T,
): T {
  const span = tracer?.start(name, options);
  if (span === undefined) return work(undefined);
  const failed = (error: unknown) => span.end(error);
  try {
    const result = work(span);
    if (result instanceof Promise) result.then(() => span.end(), failed);
    else span.end();
    return result;
  } catch (error) {
    failed(error);
    throw error;
  }
}
