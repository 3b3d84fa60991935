import type {
  Agent,
  Metrics,
  Tracer,
  Transfer,
  TransferRequest,
  TransferResult,
} from "@kv/interface";
import { METRICS } from "../metrics/metric-names.js";

const COUNTERS = [
  METRICS.failedTransfers,
  METRICS.failedNotifications,
  METRICS.expiredRequests,
  METRICS.notificationsAfterExpiry,
  METRICS.ignoredNotifications,
];

/**
 * The counters and histograms of a connector's worker, under vLLM 0.33's names
 * (`v1/nixl/stats.py`).
 */
export class TransferMetrics {
  readonly #metrics: Metrics;

  constructor(metrics: Metrics) {
    this.#metrics = metrics;
    // As in vLLM, counters are there from the start: without a first sample of 0, `increase()`
    // misses their first event.
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

  /** Counts a request whose lease ended before all its readers had completed. */
  leaseExpired(): void {
    this.#metrics.count(METRICS.expiredRequests);
  }

  /**
   * Counts a notification of a form or type that this version does not know: a newer peer may have
   * more.
   */
  notificationIgnored(): void {
    this.#metrics.count(METRICS.ignoredNotifications);
  }

  notificationAfterExpiry(): void {
    this.#metrics.count(METRICS.notificationsAfterExpiry);
  }
}

/**
 * Turns the first failure of a request's transfers into the error of the request. `isStarted`: the
 * transfer had begun.
 */
export type TransferFailed = (error: unknown, isStarted: boolean) => unknown;

/** The transfers of one request. */
export interface RequestTransfers {
  /**
   * Starts a transfer, unless one has failed. Resolves when it touches memory no more; never
   * rejects.
   */
  start(request: TransferRequest, failed?: TransferFailed): Promise<void>;
  fail(error: unknown): void;
  readonly hasFailed: boolean;
}

/**
 * Runs the transfers that `run` starts for one request. One that fails makes the others useless:
 * they are aborted, and still waited for. Resolves when none of them touches memory any more.
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
      try {
        const { done, released } = transferTraced(
          agent,
          { ...request, signal: abort.signal },
          { tracer, parent },
        );
        const ended = done.then(
          (result) => metrics.transferred(result),
          (error: unknown) => fail(error, true),
        );
        await Promise.all([ended, released]);
      } catch (error) {
        fail(error, false);
      }
    },
  });
  signal.removeEventListener("abort", onAbort);
  if (failure !== undefined) throw (failure as { readonly error: unknown }).error;
}

/**
 * As `agent.transfer`, with a span `kv.read` or `kv.write` from the start to the last byte: its
 * bytes, descriptors, the agent's first backend and the times that the transport measured.
 */
function transferTraced(
  agent: Pick<Agent, "transfer" | "backends">,
  request: TransferRequest,
  { tracer, parent }: { readonly tracer?: Tracer | undefined; readonly parent: string | undefined },
): Transfer {
  const span = tracer?.start(request.operation === "READ" ? "kv.read" : "kv.write", {
    parent,
    attributes: { "kv.backend": agent.backends[0], "kv.remote_agent": request.remote.remote },
  });
  if (span === undefined) return agent.transfer(request);
  try {
    const transfer = agent.transfer(request);
    transfer.done.then(
      ({ lengthBytes, descriptorCount, mergedCount, prepareMs, postMs, transferMs }) => {
        span.set({
          "kv.bytes": lengthBytes,
          "kv.descriptors": descriptorCount,
          "kv.merged_descriptors": mergedCount,
          "kv.prepare_ms": prepareMs,
          "kv.post_ms": postMs,
          "kv.transfer_ms": transferMs,
        });
        span.end();
      },
      (error: unknown) => span.end(error),
    );
    return transfer;
  } catch (error) {
    span.end(error);
    throw error;
  }
}
