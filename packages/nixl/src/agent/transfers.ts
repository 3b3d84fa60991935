import { types } from "node:util";
import {
  type Clock,
  KvError,
  type PreparedList,
  type Timer,
  type Transfer,
  type TransferOrder,
  type TransferRequest,
  type TransferResult,
} from "@kv/interface";
import type { NativeAgent, NativeMoves, NativeOutcome } from "../addon/native.js";
import { callNative } from "../addon/native-errors.js";
import type { RefCount } from "../ref-count.js";
import { formatValue, requireObject } from "../validate.js";
import type { AgentCalls } from "./agent-calls.js";

/** A transfer of an agent of NIXL. */
export interface NixlTransfer extends Transfer {
  /** As in `Transfer`, with NIXL's own measurements where the agent captures them. */
  readonly done: Promise<NixlTransferResult>;
}

/** Measurements of a transfer that succeeded. */
export interface NixlTransferResult extends TransferResult {
  /** What NIXL itself measured (`getXferTelemetry`), for an agent with `captureTelemetry`. */
  readonly nixl?: NixlTransferTelemetry | undefined;
}

/**
 * NIXL's own measurements of the requests of one transfer (NIXL: `nixl_xfer_telem_t`), summed over
 * its slices.
 */
export interface NixlTransferTelemetry {
  /** Bytes moved. */
  readonly lengthBytes: number;
  /** Descriptors after NIXL has merged adjacent ones. */
  readonly descriptorCount: number;
  /** Microseconds inside NIXL's posts. */
  readonly postUs: number;
  /** Microseconds from the first post to the end of the last request, as NIXL saw it. */
  readonly transferUs: number;
}

/** Options of `Transfers`. */
export interface TransfersOptions {
  /** The agent in the addon. */
  readonly native: NativeAgent;
  /** Assigns the ids of transfers. */
  readonly calls: AgentCalls;
  /** Each transfer counts as a user until its release. */
  readonly keepAlive: RefCount;
  /** Clock for `timeoutMs`. */
  readonly clock: Clock;
  /**
   * The id under which the addon knows a list. Throws `KV_TRANSFER_INVALID` for a list of another
   * agent.
   */
  listId(list: PreparedList): number;
}

/**
 * The transfers of one agent: posts them to the native thread and settles their promises when it
 * reports.
 */
export class Transfers {
  readonly #options: TransfersOptions;
  readonly #running = new Map<number, RunningTransfer>();
  #abortedBeforePost = 0;

  /** The transfers of the agent `options.native`. */
  constructor(options: TransfersOptions) {
    this.#options = options;
  }

  /**
   * Transfers whose signal was aborted already when they were requested. The native thread does not
   * count them.
   */
  get abortedBeforePost(): number {
    return this.#abortedBeforePost;
  }

  /**
   * Posts a transfer. Throws `KV_TRANSFER_INVALID` or `KV_LIST_CLOSED` for wrong arguments; every
   * other error rejects `done`.
   */
  start(request: TransferRequest): NixlTransfer {
    const askedMs = now();
    return this.#post(request, this.moves(request), askedMs);
  }

  /** Posts the requests that the call `prepared` made. Throws as `start`. */
  post(prepared: number, order: TransferOrder): NixlTransfer {
    const askedMs = now();
    requireValid(order);
    return this.#post(order, prepared, askedMs);
  }

  /** What a transfer moves, for the addon. Throws `KV_TRANSFER_INVALID` for wrong arguments. */
  moves(request: TransferRequest): NativeMoves {
    requireValid(request);
    const { operation, local, remote, localIds, remoteIds, runs, offsets } = request;
    const { listId } = this.#options;
    return [
      operation === "WRITE",
      listId(local),
      listId(remote),
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
    if (timeoutMs !== undefined) transfer.rejectAfter(timeoutMs, clock);
    if (signal !== undefined) transfer.rejectOnAbort(signal);
    this.#running.set(id, transfer);
    return { done: transfer.done, released: transfer.released };
  }

  /** The native thread reports the outcome: `error`, or a `NativeOutcome` as `value`. */
  onDone(id: number, error: KvError | undefined, value: unknown): void {
    const transfer = this.#running.get(id);
    if (error !== undefined) {
      transfer?.fail(error);
      return;
    }
    // The thread reports a success only after the release of its last NIXL request, so it is the
    // release as well.
    this.onReleased(id);
    transfer?.succeed(resultOf(value as NativeOutcome));
  }

  /**
   * Rejects every transfer that has no outcome. NIXL may still touch its memory, so `released` does
   * not resolve.
   */
  rejectAll(error: KvError): void {
    for (const transfer of this.#running.values()) transfer.fail(error);
  }

  /** The native thread has released a transfer: NIXL touches its memory no more. */
  onReleased(id: number): void {
    const transfer = this.#running.get(id);
    if (transfer === undefined) return;
    this.#running.delete(id);
    this.#options.keepAlive.release();
    transfer.release();
  }
}

/** The promises of one transfer, and the timer and the signal that abort it. */
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

  /** `abortNative` is false when the outcome is decided already. */
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
    // Too late when the outcome is already decided: its notification may be in flight.
    if (this.#abortNative()) this.fail(error);
  }

  #stopWaiting(): void {
    this.#timer?.cancel();
    this.#stopListening?.();
  }
}

/**
 * Checks what the addon does not check itself, before anything is posted: a transfer that cannot be
 * reported would never be released.
 */
function requireValid(request: TransferOrder): void {
  requireObject(request, "KV_TRANSFER_INVALID", "a transfer");
  const { operation, notification, signal, timeoutMs } = request;
  if (operation !== "READ" && operation !== "WRITE") {
    throw invalid(`operation is ${formatValue(operation)}, not READ or WRITE`);
  }
  if (
    timeoutMs !== undefined &&
    !(typeof timeoutMs === "number" && timeoutMs > 0 && timeoutMs < 2 ** 31)
  ) {
    throw invalid(`timeoutMs is ${formatValue(timeoutMs)}, not a number between 0 and 2^31`);
  }
  if (signal !== undefined && !isSignal(signal)) {
    throw invalid(`signal is ${formatValue(signal)}, not an AbortSignal`);
  }
  if (notification !== undefined && !types.isUint8Array(notification)) {
    throw invalid("the notification is not a Uint8Array");
  }
}

const invalid = (message: string): KvError => new KvError("KV_TRANSFER_INVALID", message);

/**
 * Checks the members that are used: an `AbortSignal` of another realm is no instance of this
 * realm's class.
 */
function isSignal(value: unknown): value is AbortSignal {
  if (typeof value !== "object" || value === null) return false;
  const { aborted, addEventListener, removeEventListener } = value as Partial<AbortSignal>;
  return (
    typeof aborted === "boolean" &&
    typeof addEventListener === "function" &&
    typeof removeEventListener === "function"
  );
}

function resultOf(outcome: NativeOutcome): NixlTransferResult {
  const [
    lengthBytes,
    descriptorCount,
    mergedCount,
    prepareMs,
    makeMs,
    postMs,
    transferMs,
    ...measured
  ] = outcome;
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

/** Milliseconds of the clock that the addon reads. */
function now(): number {
  const [seconds, nanoseconds] = process.hrtime();
  return seconds * 1e3 + nanoseconds / 1e6;
}

function abortedError(operation: string, signal: AbortSignal): KvError {
  return new KvError("KV_TRANSFER_ABORTED", `${operation} was aborted by its caller`, {
    cause: signal.reason,
  });
}

/**
 * A caller that awaits only `released` causes no unhandled rejection. Whoever awaits the promise
 * sees its error.
 */
function withoutUnhandledRejection<T>(promise: Promise<T>): Promise<T> {
  promise.catch(() => {});
  return promise;
}
