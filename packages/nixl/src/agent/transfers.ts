import { types } from "node:util";
import {
  type Clock,
  KvError,
  type Timer,
  type Transfer,
  type TransferOrder,
  type TransferRequest,
  type TransferResult,
} from "@kv/interface";
import type { NativeAgent, NativeMoves, NativeOutcome } from "../addon/native.js";
import { callNative } from "../addon/native-errors.js";
import type { RefCount } from "../ref-count.js";
import { formatValue, requireOptions, timerMs } from "../validate.js";
import type { AgentCalls } from "./agent-calls.js";
import type { PreparedLists } from "./prepared-lists.js";

/** A transfer of an agent of NIXL. */
export interface NixlTransfer extends Transfer {
  /** Includes NIXL's own measurements, where the agent captures them. */
  readonly done: Promise<NixlTransferResult>;
}

/** Measurements of a transfer that succeeded. */
export interface NixlTransferResult extends TransferResult {
  /** NIXL's own measurements (`getXferTelemetry`), for an agent with `captureTelemetry`. */
  readonly nixl?: NixlTransferTelemetry | undefined;
}

/** NIXL's own measurements of one transfer (`nixl_xfer_telem_t`), summed over its slices. */
export interface NixlTransferTelemetry {
  readonly lengthBytes: number;
  /** Descriptors after NIXL has merged adjacent ones. */
  readonly descriptorCount: number;
  /** Microseconds inside NIXL's posts. */
  readonly postUs: number;
  /** Microseconds from the first post to the end of the last request. */
  readonly transferUs: number;
}

export interface TransfersOptions {
  readonly native: NativeAgent;
  readonly calls: AgentCalls;
  /** Each transfer counts as a user until its release. */
  readonly keepAlive: RefCount;
  readonly clock: Clock;
  readonly lists: PreparedLists;
}

export class Transfers {
  readonly #options: TransfersOptions;
  readonly #running = new Map<number, RunningTransfer>();
  #abortedBeforePost = 0;

  constructor(options: TransfersOptions) {
    this.#options = options;
  }

  /**
   * Transfers whose signal was aborted before the request; the native thread does not count them.
   */
  get abortedBeforePost(): number {
    return this.#abortedBeforePost;
  }

  /**
   * Throws `KV_TRANSFER_INVALID` or `KV_LIST_CLOSED` for wrong arguments; other errors reject
   * `done`.
   */
  start(request: TransferRequest): NixlTransfer {
    const askedMs = now();
    return this.#post(request, this.moves(request), askedMs);
  }

  /** Posts the requests of the call `prepared`. Throws as `start`. */
  post(prepared: number, order: TransferOrder): NixlTransfer {
    const askedMs = now();
    requireValid(order);
    return this.#post(order, prepared, askedMs);
  }

  /** Throws `KV_TRANSFER_INVALID`. */
  moves(request: TransferRequest): NativeMoves {
    requireValid(request);
    const { operation, local, remote, localIds, remoteIds, runs, offsets } = request;
    const { lists } = this.#options;
    return [
      operation === "WRITE",
      lists.idOf(local),
      lists.idOf(remote),
      localIds,
      remoteIds,
      runs,
      offsets,
    ];
  }

  #post(order: TransferOrder, what: NativeMoves | number, askedMs: number): NixlTransfer {
    const { operation, remote, notification, signal, timeoutMs } = order;
    const { native, calls, keepAlive, clock } = this.#options;
    if (
      notification !== undefined &&
      (remote.memoryType === "FILE" || remote.memoryType === "OBJ")
    ) {
      throw invalid(
        "the transfer has a notification, but its remote side is storage: there is no peer to notify",
      );
    }
    if (signal?.aborted === true) {
      this.#abortedBeforePost += 1;
      const done = Promise.reject(abortedError(operation, signal));
      return { done: withoutUnhandledRejection(done), released: Promise.resolve() };
    }
    const id = calls.nextId();
    const abortable = signal !== undefined || timeoutMs !== undefined;
    const outcome = callNative(() => native.transfer(id, what, askedMs, abortable, notification));
    if (outcome !== undefined)
      return { done: Promise.resolve(resultOf(outcome)), released: Promise.resolve() };
    keepAlive.acquire();
    const transfer = new RunningTransfer(order, () => native.abort(id));
    const waitMs = timerMs(timeoutMs, "KV_TRANSFER_INVALID");
    if (waitMs !== undefined) transfer.rejectAfter(waitMs, clock);
    if (signal !== undefined) transfer.rejectOnAbort(signal);
    this.#running.set(id, transfer);
    return { done: transfer.done, released: transfer.released };
  }

  onDone(id: number, error: KvError | undefined, value: unknown): void {
    const transfer = this.#running.get(id);
    if (error !== undefined) {
      transfer?.fail(error);
      return;
    }
    // The thread reports a success only after it has released the last NIXL request.
    this.#release(id);
    transfer?.succeed(resultOf(value as NativeOutcome));
  }

  /** Leaves `released` pending, since NIXL may still touch the memory. */
  rejectAll(error: KvError): void {
    for (const transfer of this.#running.values()) transfer.fail(error);
  }

  /** For an agent that has released everything. */
  endAll(error: KvError): void {
    this.rejectAll(error);
    for (const id of [...this.#running.keys()]) this.onReleased(id);
  }

  /** NIXL no longer touches the transfer's memory. */
  onReleased(id: number): void {
    const transfer = this.#running.get(id);
    this.#release(id);
    // Takes effect only when the thread had no memory to report the outcome.
    transfer?.fail(new KvError("KV_TRANSFER_FAILED", "the outcome of the transfer was lost"));
  }

  #release(id: number): void {
    const transfer = this.#running.get(id);
    if (transfer === undefined) return;
    this.#running.delete(id);
    this.#options.keepAlive.release();
    transfer.release();
  }
}

class RunningTransfer {
  readonly done: Promise<NixlTransferResult>;
  readonly released: Promise<void>;
  readonly #request: TransferOrder;
  readonly #abortNative: () => boolean;
  #resolve: (result: NixlTransferResult) => void = () => {};
  #reject: (error: KvError) => void = () => {};
  #resolveReleased: () => void = () => {};
  #timer: Timer | undefined;
  #stopListening: (() => void) | undefined;

  /** `abortNative` returns false when the outcome is decided already. */
  constructor(request: TransferOrder, abortNative: () => boolean) {
    this.#request = request;
    this.#abortNative = abortNative;
    this.released = new Promise((resolve) => {
      this.#resolveReleased = resolve;
    });
    const done = new Promise<NixlTransferResult>((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
    this.done = withoutUnhandledRejection(done);
  }

  rejectAfter(timeoutMs: number, clock: Clock): void {
    this.#timer = clock.setTimer(() => this.#onTimeout(timeoutMs), timeoutMs);
  }

  rejectOnAbort(signal: AbortSignal): void {
    const onAbort = () => this.#giveUp(abortedError(this.#request.operation, signal));
    signal.addEventListener("abort", onAbort, { once: true });
    this.#stopListening = () => signal.removeEventListener("abort", onAbort);
  }

  succeed(result: NixlTransferResult): void {
    this.#stopWaiting();
    this.#resolve(result);
  }

  fail(error: KvError): void {
    this.#stopWaiting();
    this.#reject(error);
  }

  release(): void {
    this.#resolveReleased();
  }

  #onTimeout(timeoutMs: number): void {
    const { operation, remote: list } = this.#request;
    const details = { operation, remote: list.remote, timeoutMs };
    const message = `${operation} from or to ${list.remote} took longer than ${timeoutMs} ms`;
    this.#giveUp(new KvError("KV_TRANSFER_TIMEOUT", message, { details }));
  }

  #giveUp(error: KvError): void {
    // A decided outcome stands: its notification may be in flight.
    if (this.#abortNative()) this.fail(error);
  }

  #stopWaiting(): void {
    this.#timer?.cancel();
    this.#stopListening?.();
  }
}

const MEMBERS = [
  ...(["operation", "local", "localIds", "remote", "remoteIds", "runs", "offsets"] as const),
  ...(["notification", "signal", "timeoutMs"] as const),
];

/**
 * Checks what the addon does not, before the post: a transfer that cannot be reported would never
 * be released.
 */
function requireValid(request: TransferOrder): void {
  requireOptions<TransferRequest>(
    request as TransferRequest,
    "KV_TRANSFER_INVALID",
    "a transfer",
    MEMBERS,
  );
  const { operation, notification, signal, timeoutMs } = request;
  if (operation !== "READ" && operation !== "WRITE") {
    throw invalid(`operation is ${formatValue(operation)}, not READ or WRITE`);
  }
  timerMs(timeoutMs, "KV_TRANSFER_INVALID");
  if (signal !== undefined && !isSignal(signal)) {
    throw invalid(`signal is ${formatValue(signal)}, not an AbortSignal`);
  }
  if (notification !== undefined && !types.isUint8Array(notification)) {
    throw invalid("the notification is not a Uint8Array");
  }
}

const invalid = (message: string): KvError => new KvError("KV_TRANSFER_INVALID", message);

/** An `AbortSignal` of another realm is no instance of this realm's class. */
function isSignal(value: unknown): value is AbortSignal {
  if (typeof value !== "object" || value === null) return false;
  const { aborted, addEventListener, removeEventListener } = value as Partial<AbortSignal>;
  return (
    typeof aborted === "boolean" &&
    typeof addEventListener === "function" &&
    typeof removeEventListener === "function"
  );
}

function resultOf([
  lengthBytes,
  descriptorCount,
  mergedCount,
  prepareMs,
  makeMs,
  postMs,
  transferMs,
  ...measured
]: NativeOutcome): NixlTransferResult {
  const result = {
    lengthBytes,
    descriptorCount,
    mergedCount,
    prepareMs,
    makeMs,
    postMs,
    transferMs,
  };
  if (measured.length === 0) return result;
  const [nixlBytes, nixlDescriptors, postUs, transferUs] = measured;
  const nixl = { lengthBytes: nixlBytes, descriptorCount: nixlDescriptors, postUs, transferUs };
  return { nixl, ...result };
}

/** In milliseconds of the addon's clock. */
function now(): number {
  const [seconds, nanoseconds] = process.hrtime();
  return seconds * 1e3 + nanoseconds / 1e6;
}

function abortedError(operation: string, signal: AbortSignal): KvError {
  return new KvError("KV_TRANSFER_ABORTED", `${operation} was aborted by its caller`, {
    cause: signal.reason,
  });
}

/** A caller that awaits only `released` must not cause an unhandled rejection. */
function withoutUnhandledRejection<T>(promise: Promise<T>): Promise<T> {
  promise.catch(() => {});
  return promise;
}
