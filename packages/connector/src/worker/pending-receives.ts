import { type KvCacheRegion, type KvCaches, KvError, type Span, type Timer } from "@kv/interface";
import { applyReceivePass, type RequestPlan, uncoveredRuns } from "@kv/plan";
import type { EngineReference, OpenEngine, RemoteEngine } from "../peers/remote-engine.js";
import { type TaskTracker, traced } from "../peers/transfers.js";
import type { RemoteRequest } from "../requests/references.js";
import type { WorkerContext } from "./connector-worker.js";

/** Orders a worker to receive one request's KV. */
export interface ReceiveOrderBase {
  readonly requestId: string;
  readonly remote: RemoteRequest;
  readonly localBlockIds: readonly (readonly number[])[];
}

export interface Receiver<Order extends ReceiveOrderBase> {
  /**
   * Settles when nothing can touch the blocks any more; rejects (best with a `ReceiveError`) when
   * the KV did not arrive.
   */
  run(receive: PendingReceive<Order>): Promise<void>;
  ended?(receive: PendingReceive<Order>, error: ReceiveError | undefined): void;
}

/** Options of `PendingReceives`. */
export interface PendingReceivesOptions
  extends Pick<WorkerContext, "caches" | "clock" | "hasSingleGroup" | "log" | "output" | "tracer"> {
  readonly tasks: TaskTracker;
  /** From the order until the KV is in place, unless `PendingReceive.allow` changes it. */
  readonly timeoutMs: number;
}

/** One request whose KV is being received. */
export class PendingReceive<Order extends ReceiveOrderBase> {
  /** A trace shows the order's spans under the receive. */
  readonly order: Order;
  readonly #span: Span | undefined;
  readonly #options: PendingReceivesOptions;
  readonly #pass: ReceivePass;
  readonly #controller = new AbortController();
  readonly #startedMs: number;
  #timer: Timer;
  isReported = false;
  /** The engine waits for the blocks and gets no failure report. */
  isAborted = false;
  /** P has compared the prompts. Set by the receiver. */
  isVerified = false;
  /** Push sets it when the blocks are registered with an engine. */
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
   * Opens the order's engine, which the caller releases. `isNamed`: an `@kv` P finds the request
   * without `kv_peer`.
   * @throws `ReceiveError` with `failureType`.
   */
  async open<Engine extends OpenEngine>(
    engines: {
      acquire(request: RemoteRequest, signal: AbortSignal): Promise<EngineReference<Engine>>;
    },
    failureType: FailureType,
    isNamed = false,
  ): Promise<EngineReference<Engine>> {
    try {
      const reference = await engines.acquire(this.order.remote, this.signal);
      if (!isNamed) requirePeerParams(this.order.remote, reference);
      return reference;
    } catch (error) {
      throw this.error(error, failureType, "KV_HANDSHAKE_REFUSED");
    }
  }

  /**
   * Reorders heads and tokens and zeroes uncovered tokens where the plan says so.
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

  /** From the order on, in ms. */
  allow(timeoutMs: number): void {
    this.#timer.cancel();
    this.#timer = this.#deadline(timeoutMs);
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  /** Ends the receive; the engine gets the failure. */
  fail(reason: KvError): void {
    this.#controller.abort(reason);
  }

  /** The engine aborted the request: only the blocks' return is reported. */
  abort(reason: KvError): void {
    this.isAborted = true;
    this.#controller.abort(reason);
  }

  /** Reports a failure while a peer may still write. The blocks are safe when `run` settles. */
  reportBlocksAtRisk(error: ReceiveError): void {
    if (this.isAborted) return;
    this.isReported = true;
    this.report(error, true);
  }

  report({ error, failureType }: ReceiveError, blocksAtRisk: boolean): void {
    const { log, output, hasSingleGroup } = this.#options;
    const { requestId, remote, localBlockIds } = this.order;
    const { code, message } = error;
    const risk = blocksAtRisk ? { blocksAtRisk } : {};
    const { engineId } = remote;
    log.warn("receive-failed", { requestId, engineId, failureType, code, error: message, ...risk });
    const blockIds = hasSingleGroup ? (localBlockIds[0] ?? []) : [];
    output.receiveFailed({ requestId, code, message, failureType, blockIds, ...risk });
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

/** The requests that D's worker receives. Each has an outcome by its deadline. */
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

  /** Ignores a second order: two transfers must not fill the same blocks. */
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

  abort(
    requestId: string,
    reason = new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted`),
  ): void {
    this.#receives.get(requestId)?.abort(reason);
  }

  values(): Iterable<PendingReceive<Order>> {
    return this.#receives.values();
  }

  /** Reports nothing from now on, because a peer may write after a receive ends. */
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

/**
 * An `@kv` P answers with `kv_peer`: without it, P cannot tell whose blocks D means.
 * @throws `KV_REQUEST_INVALID`; then the reference is released.
 */
function requirePeerParams(
  { engineId, requestId, lease, blocks }: RemoteRequest,
  { engine, release }: EngineReference<OpenEngine>,
): void {
  if (engine.incarnation === undefined || lease !== undefined || blocks === undefined) return;
  release();
  throw new KvError(
    "KV_REQUEST_INVALID",
    `kv_transfer_params of request ${requestId} have no kv_peer, which engine ${engineId} sends: something between the two workers left it out`,
    {
      hint: "pass the kv_transfer_params of the prefill answer on unchanged; a router must keep keys that it does not know",
      details: { key: "kv_peer", engineId },
    },
  );
}

function timeoutError(
  { requestId, remote: { engineId } }: ReceiveOrderBase,
  timeoutMs: number,
): KvError {
  const message = `the KV of request ${requestId} did not arrive from engine ${engineId} within ${timeoutMs} ms`;
  return new KvError("KV_REQUEST_TIMEOUT", message, { details: { engineId, timeoutMs } });
}

type Pass = NonNullable<RequestPlan["receivePass"]>;

class ReceivePass {
  readonly #caches: KvCaches;
  #views: readonly Uint8Array[] | undefined;

  constructor(caches: KvCaches) {
    this.#caches = caches;
  }

  /**
   * In device memory it only zeroes, with `Memory.scatter`: the plan has put the bytes in order.
   * @throws `KV_PLATFORM_UNSUPPORTED` for device memory without `scatter`; those of `scatter`.
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

/** `[offset from the region's base, length]`. */
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

/** vLLM 0.33's `failure_type` values and this project's. */
export type FailureType =
  | "handshake_failed"
  | "transfer_setup_failed"
  | "transfer_failed"
  | "transfer_exception"
  | "push_reg_handshake_failed"
  | "push_reg_notif_failed"
  | "lease_expired"
  /** Pull: P did not say whether it still held the blocks that D read. */
  | "lease_query_failed"
  /** Pull: P has computed another prompt. */
  | "prompt_mismatch"
  /** Push: P will not write. */
  | "push_refused"
  | "push_timed_out";

/** Why a request's KV did not arrive. Names the failed step as vLLM does. */
export class ReceiveError extends Error {
  constructor(
    readonly error: KvError,
    readonly failureType: FailureType,
  ) {
    super(error.message, { cause: error });
  }

  /**
   * After an abort, the signal's reason replaces the error. `code`: for errors other than
   * `KvError`.
   */
  static from(
    error: unknown,
    code: KvError["code"],
    failureType: FailureType,
    signal: AbortSignal,
  ): ReceiveError {
    if (error instanceof ReceiveError) return error;
    const reason = signal.aborted ? signal.reason : withoutAddress(error);
    return new ReceiveError(KvError.from(reason, code, "a receive failed"), failureType);
  }
}

/** They say what is at an address. */
const ABOUT_THE_ADDRESS: readonly KvError["code"][] = [
  "KV_SIDE_CHANNEL_UNREACHABLE",
  "KV_SIDE_CHANNEL_TIMEOUT",
  "KV_WIRE_MALFORMED",
  "KV_WIRE_LIMIT_EXCEEDED",
];

/** Hides what is at the client's address, or nothing: D must not be its clients' port scanner. */
function withoutAddress(error: unknown): unknown {
  if (KvError.is(error, "KV_HANDSHAKE_BACKED_OFF")) {
    return new KvError(
      "KV_HANDSHAKE_BACKED_OFF",
      "the worker that kv_transfer_params name has failed before and is not tried again yet",
      {
        hint: "the log of the worker that answers says why; send the prompt to another prefill worker",
      },
    );
  }
  if (!KvError.is(error) || !ABOUT_THE_ADDRESS.includes(error.code)) return error;
  return new KvError(
    "KV_SIDE_CHANNEL_UNREACHABLE",
    "the worker that kv_transfer_params name does not answer",
    {
      hint: "the log of the worker that answers says why; send the prompt to a prefill worker again",
    },
  );
}
