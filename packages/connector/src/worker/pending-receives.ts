import { type KvCacheRegion, type KvCaches, KvError, type Span, type Timer } from "@kv/interface";
import { applyReceivePass, type RequestPlan, uncoveredRuns } from "@kv/plan";
import { type TaskTracker, traced } from "../peers/background-work.js";
import type { EngineReference, OpenEngine, RemoteEngine } from "../peers/remote-engine.js";
import type { RemoteRequest } from "../requests/remote-request.js";
import type { WorkerContext } from "./connector-worker.js";
import { type FailureType, ReceiveError } from "./receive-error.js";

/** A scheduler side's order to receive one request's KV. */
export interface ReceiveOrderBase {
  readonly requestId: string;
  readonly remote: RemoteRequest;
  readonly localBlockIds: readonly (readonly number[])[];
}

/** Receives one request's KV. */
export interface Receiver<Order extends ReceiveOrderBase> {
  /**
   * Settles when nothing can touch the request's blocks any more; rejects (best with a
   * `ReceiveError`) when the KV did not arrive.
   */
  run(receive: PendingReceive<Order>): Promise<void>;
  /** Called after `run`, before the outcome is reported. `error` is undefined after a success. */
  ended?(receive: PendingReceive<Order>, error: ReceiveError | undefined): void;
}

/** As `RemoteEngines.acquire`. */
interface EngineSource<Engine> {
  acquire(request: RemoteRequest, signal: AbortSignal): Promise<EngineReference<Engine>>;
}

/** Options of `PendingReceives`. */
export interface PendingReceivesOptions
  extends Pick<WorkerContext, "caches" | "clock" | "hasSingleGroup" | "log" | "output" | "tracer"> {
  readonly tasks: TaskTracker;
  /** From the order until the KV is in place, in ms. `PendingReceive.allow` changes it. */
  readonly timeoutMs: number;
}

/** One request whose KV is being received. */
export class PendingReceive<Order extends ReceiveOrderBase> {
  /** The scheduler's order. In a trace, the receive is the parent of the spans about the order. */
  readonly order: Order;
  readonly #span: Span | undefined;
  readonly #options: PendingReceivesOptions;
  readonly #pass: ReceivePass;
  readonly #controller = new AbortController();
  readonly #startedMs: number;
  #timer: Timer;
  isReported = false;
  /**
   * Whether the engine aborted the request. It then waits for the blocks, and gets no failure
   * report.
   */
  isAborted = false;
  /** Whether P has compared the prompt with the one that it computed. Set by the receiver. */
  isVerified = false;
  /**
   * The engine that the blocks were registered with; undefined where none is open yet, and in pull.
   * Set by the receiver.
   */
  engine: OpenEngine | undefined;

  constructor(order: Order, options: PendingReceivesOptions, pass: ReceivePass) {
    const { clock, timeoutMs, tracer } = options;
    const { requestId, remote } = order;
    this.#span = tracer?.start("kv.receive", {
      parent: remote.traceparent,
      attributes: { "kv.request_id": requestId, "kv.remote_engine_id": remote.engineId },
    });
    this.order =
      this.#span === undefined
        ? order
        : { ...order, remote: { ...remote, traceparent: this.#span.traceparent } };
    this.#options = options;
    this.#pass = pass;
    this.#startedMs = clock.now();
    this.#timer = this.#deadline(timeoutMs);
  }

  /**
   * Opens the engine that the order names; the caller releases it.
   * @throws `ReceiveError` with `failureType`.
   */
  async open<Engine>(
    engines: EngineSource<Engine>,
    failureType: FailureType,
  ): Promise<EngineReference<Engine>> {
    try {
      return await engines.acquire(this.order.remote, this.signal);
    } catch (error) {
      throw this.error(error, failureType, "KV_HANDSHAKE_REFUSED");
    }
  }

  /**
   * Makes the pass over the blocks after the last byte has landed, where the plan has one: it
   * reorders heads and tokens and zeroes uncovered tokens.
   * @throws `ReceiveError`.
   */
  async pass(engine: RemoteEngine, plan: RequestPlan): Promise<void> {
    const { receivePass } = plan;
    if (receivePass === undefined) return;
    const { remote } = this.order;
    try {
      await traced(this.#options.tracer, "kv.receive_pass", { parent: remote.traceparent }, () =>
        this.#pass.apply(engine, receivePass),
      );
    } catch (error) {
      throw this.error(error, "transfer_exception");
    }
  }

  error(
    error: unknown,
    failureType: FailureType,
    code: KvError["code"] = "KV_TRANSFER_FAILED",
  ): ReceiveError {
    return ReceiveError.from(error, code, failureType, this.signal);
  }

  /** Changes how long the receive may take from the order on, in ms. */
  allow(timeoutMs: number): void {
    this.#timer.cancel();
    this.#timer = this.#deadline(timeoutMs);
  }

  /** Aborts when the request was aborted, has failed, or has reached its deadline. */
  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  /** Ends the receive with a failure that is reported to the engine. */
  fail(reason: KvError): void {
    this.#controller.abort(reason);
  }

  /**
   * Ends the receive because the engine aborted the request: only the return of the blocks is
   * reported.
   */
  abort(reason: KvError): void {
    this.isAborted = true;
    this.#controller.abort(reason);
  }

  /**
   * Reports the failure early: a peer may still write to the blocks. They are reported as safe when
   * `run` settles.
   */
  reportBlocksAtRisk(error: ReceiveError): void {
    if (this.isAborted) return;
    this.isReported = true;
    this.report(error, true);
  }

  report(error: ReceiveError, blocksAtRisk: boolean): void {
    const { log, output, hasSingleGroup } = this.#options;
    const { requestId, remote, localBlockIds } = this.order;
    log.warn("receive-failed", {
      requestId,
      engineId: remote.engineId,
      failureType: error.failureType,
      code: error.error.code,
      error: error.error.message,
      ...(blocksAtRisk ? { blocksAtRisk } : {}),
    });
    const invalidBlockIds = hasSingleGroup ? (localBlockIds[0] ?? []) : [];
    output.receiveFailed(requestId, error, { invalidBlockIds, blocksAtRisk });
  }

  #deadline(timeoutMs: number): Timer {
    const { clock } = this.#options;
    const leftMs = Math.max(0, this.#startedMs + timeoutMs - clock.now());
    return clock.setTimer(() => this.fail(timeoutError(this.order, timeoutMs)), leftMs, {
      ref: true,
    });
  }

  end(error: ReceiveError | undefined): void {
    this.#timer.cancel();
    this.#span?.end(error?.error);
  }
}

/**
 * The requests whose KV D's worker is receiving. Each runs independently, and its outcome is in the
 * worker's output at its deadline at the latest.
 */
export class PendingReceives<Order extends ReceiveOrderBase> {
  readonly #options: PendingReceivesOptions;
  readonly #receiver: Receiver<Order>;
  readonly #receives = new Map<string, PendingReceive<Order>>();
  readonly #pass: ReceivePass;
  #isAbandoned = false;

  constructor(options: PendingReceivesOptions, receiver: Receiver<Order>) {
    this.#options = options;
    this.#receiver = receiver;
    this.#pass = new ReceivePass(options.caches);
  }

  /**
   * Starts a receive. A second order for the same request is logged and ignored: two transfers must
   * not fill the same blocks.
   */
  start(order: Order): void {
    const { log, tasks } = this.#options;
    const { requestId } = order;
    if (this.#receives.has(requestId)) {
      log.error("receive-ordered-twice", { requestId });
      return;
    }
    const receive = new PendingReceive(order, this.#options, this.#pass);
    this.#receives.set(requestId, receive);
    tasks.track(
      this.#receiver.run(receive).then(
        () => this.#succeeded(receive),
        (error: unknown) =>
          this.#failed(receive, receive.error(error, "transfer_exception", "KV_INTERNAL")),
      ),
    );
  }

  /** Called when the engine aborts the request. No effect for an unknown request. */
  abort(requestId: string, reason: KvError): void {
    this.#receives.get(requestId)?.abort(reason);
  }

  values(): Iterable<PendingReceive<Order>> {
    return this.#receives.values();
  }

  /**
   * Reports nothing from now on: a receive may end although a peer can still write to its blocks.
   */
  abandonAll(): void {
    this.#isAbandoned = true;
  }

  get size(): number {
    return this.#receives.size;
  }

  #succeeded(receive: PendingReceive<Order>): void {
    this.#end(receive, undefined);
    const { order, isVerified } = receive;
    if (!this.#isAbandoned) this.#options.output.received(order.requestId, isVerified);
  }

  #failed(receive: PendingReceive<Order>, error: ReceiveError): void {
    const { output } = this.#options;
    const { requestId } = receive.order;
    this.#end(receive, error);
    if (this.#isAbandoned) return;
    if (receive.isReported) output.blocksSafe(requestId);
    else if (receive.isAborted) output.received(requestId, true);
    else receive.report(error, false);
  }

  #end(receive: PendingReceive<Order>, error: ReceiveError | undefined): void {
    receive.end(error);
    this.#receives.delete(receive.order.requestId);
    this.#receiver.ended?.(receive, error);
  }
}

function timeoutError(
  { requestId, remote: { engineId } }: ReceiveOrderBase,
  timeoutMs: number,
): KvError {
  const message = `the KV of request ${requestId} did not arrive from engine ${engineId} within ${timeoutMs} ms`;
  return new KvError("KV_REQUEST_TIMEOUT", message, { details: { engineId, timeoutMs } });
}

type Pass = NonNullable<RequestPlan["receivePass"]>;

/** The receive passes over D's blocks. */
class ReceivePass {
  readonly #caches: KvCaches;
  #views: readonly Uint8Array[] | undefined;

  constructor(caches: KvCaches) {
    this.#caches = caches;
  }

  /**
   * In device memory it zeroes with `Memory.scatter`: the plan has put the bytes in order. Rejects
   * with `KV_PLATFORM_UNSUPPORTED` for device memory without `scatter`, and with the errors of
   * `scatter`.
   */
  async apply({ plan }: RemoteEngine, receivePass: Pass): Promise<void> {
    const { regions } = this.#caches;
    if (regions.every(({ memoryType }) => memoryType === "DRAM")) {
      this.#views ??= regions.map(viewOf);
      applyReceivePass(plan, receivePass, this.#views);
      return;
    }
    await Promise.all(
      [...uncoveredRuns(plan, receivePass)].map(async ([index, runs]) => {
        const region = regions[index];
        if (region !== undefined) await zeroRuns(region, runs);
      }),
    );
  }
}

function viewOf({
  memory,
  offsetBytes,
  numBlocks,
  blockLengthBytes,
  blockStrideBytes,
}: KvCacheRegion): Uint8Array {
  return memory.view(offsetBytes, (numBlocks - 1) * blockStrideBytes + blockLengthBytes);
}

/** Zeroes rows `[offset from the region's base, length]`, which it changes. */
async function zeroRuns(
  { name, memory, offsetBytes }: KvCacheRegion,
  rows: Float64Array,
): Promise<void> {
  let total = 0;
  for (let at = 0; at < rows.length; at += 2) {
    rows[at] = (rows[at] ?? 0) + offsetBytes;
    total += rows[at + 1] ?? 0;
  }
  try {
    await memory.scatter(rows, new ArrayBuffer(total));
  } catch (cause) {
    if (!KvError.is(cause, "KV_TRANSPORT_UNSUPPORTED")) throw cause;
    throw new KvError(
      "KV_PLATFORM_UNSUPPORTED",
      `region ${name} is in ${memory.memoryType}, and its uncovered tokens cannot be zeroed: ${cause.message}`,
      {
        cause,
        hint: "allocate the cache with the transport's allocate(), or give deviceMemory() the `copies` of the device's runtime",
      },
    );
  }
}
