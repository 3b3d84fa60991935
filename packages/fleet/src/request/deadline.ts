import { type Clock, KvError, type Timer } from "@kv/interface";

const nothing = () => {};

/** Creates an `AbortSignal` only when `signal` is read, which few legs do. */
export class LazyAbort {
  #reason: KvError | undefined;
  #controller: AbortController | undefined;
  #listeners: Set<() => void> | undefined;

  get aborted(): boolean {
    return this.#reason !== undefined;
  }

  /** Undefined until the abort. */
  get reason(): KvError | undefined {
    return this.#reason;
  }

  /** Its reason is `reason`. */
  get signal(): AbortSignal {
    if (this.#controller === undefined) {
      this.#controller = new AbortController();
      if (this.#reason !== undefined) this.#controller.abort(this.#reason);
    }
    return this.#controller.signal;
  }

  /**
   * Calls `listener` once, at the abort or at once after it. Returns a function that removes it.
   */
  onAbort(listener: () => void): () => void {
    if (this.#reason !== undefined) {
      listener();
      return nothing;
    }
    this.#listeners ??= new Set();
    this.#listeners.add(listener);
    return () => void this.#listeners?.delete(listener);
  }

  /** The first reason stays. */
  abort(reason: KvError): void {
    if (this.#reason !== undefined) return;
    this.#reason = reason;
    this.#controller?.abort(reason);
    const listeners = this.#listeners ?? [];
    this.#listeners = undefined;
    for (const listener of listeners) listener();
  }
}

export interface DeadlineOptions {
  readonly clock: Clock;
  /** Time limit of the whole request, in milliseconds; none by default. */
  readonly requestMs?: number | undefined;
  /** Its abort aborts this deadline. */
  readonly parent?: LazyAbort | undefined;
}

/**
 * Few phases expire, so one timer checks for many at most this late. Only a phase that expires
 * earlier sets another.
 */
const MAX_TIMER_MS = 30_000;

/**
 * Limits the time of a request and of its present phase. It aborts when one expires, or by `abort`.
 */
export class Deadline extends LazyAbort {
  readonly #clock: Clock;
  readonly #requestMs: number;
  readonly #requestEndsAtMs: number;
  readonly #leaveParent: (() => void) | undefined;
  #phase = "";
  #phaseMs = 0;
  #phaseEndsAtMs = Number.POSITIVE_INFINITY;
  #timer: Timer | undefined;
  #timerAtMs = Number.POSITIVE_INFINITY;
  #closed = false;

  constructor({ clock, requestMs = Number.POSITIVE_INFINITY, parent }: DeadlineOptions) {
    super();
    this.#clock = clock;
    this.#requestMs = requestMs;
    const nowMs = clock.now();
    this.#requestEndsAtMs = nowMs + requestMs;
    this.#leaveParent = parent?.onAbort(() => {
      if (parent.reason !== undefined) this.abort(parent.reason);
    });
    this.#setTimer(this.#requestEndsAtMs, nowMs);
  }

  /** `phase` names it in the error. */
  startPhase(phase: string, timeoutMs: number): void {
    if (this.#closed) return;
    const nowMs = this.#clock.now();
    this.#phase = phase;
    this.#phaseMs = timeoutMs;
    this.#phaseEndsAtMs = nowMs + timeoutMs;
    this.#setTimer(this.#phaseEndsAtMs, nowMs);
  }

  endPhase(): void {
    this.#phaseEndsAtMs = Number.POSITIVE_INFINITY;
    // Unclosed forks are common. The timer would keep them and all listeners in memory.
    if (this.#requestEndsAtMs === Number.POSITIVE_INFINITY) this.#cancelTimer();
  }

  override abort(reason: KvError): void {
    this.close();
    super.abort(reason);
  }

  /** Has its own phases, and aborts with this one at the latest. */
  fork(): Deadline {
    return new Deadline({ clock: this.#clock, parent: this });
  }

  /** The reason of the abort, else `error`. An abort's error does not say why. */
  reasonOr(error: unknown): unknown {
    return this.reason ?? error;
  }

  /** Ends all time limits without an abort. */
  close(): void {
    this.#closed = true;
    this.endPhase();
    this.#leaveParent?.();
    this.#cancelTimer();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  #setTimer(atMs: number, nowMs: number): void {
    if (this.#closed || atMs === Number.POSITIVE_INFINITY) return;
    const waitMs = Math.min(Math.max(0, atMs - nowMs), MAX_TIMER_MS);
    if (this.#timerAtMs <= nowMs + waitMs) return;
    this.#cancelTimer();
    this.#timerAtMs = nowMs + waitMs;
    this.#timer = this.#clock.setTimer(() => this.#onTimer(), waitMs);
  }

  #cancelTimer(): void {
    this.#timer?.cancel();
    this.#timer = undefined;
    this.#timerAtMs = Number.POSITIVE_INFINITY;
  }

  #onTimer(): void {
    this.#timer = undefined;
    this.#timerAtMs = Number.POSITIVE_INFINITY;
    const nowMs = this.#clock.now();
    const dueMs = nowMs + 1;
    if (this.#phaseEndsAtMs <= dueMs) this.#expire(this.#phase, this.#phaseMs);
    else if (this.#requestEndsAtMs <= dueMs) this.#expire("the request", this.#requestMs);
    else this.#setTimer(Math.min(this.#phaseEndsAtMs, this.#requestEndsAtMs), nowMs);
  }

  #expire(phase: string, timeoutMs: number): void {
    const message = `${phase} took longer than ${timeoutMs} ms`;
    this.abort(new KvError("KV_REQUEST_TIMEOUT", message, { details: { phase, timeoutMs } }));
  }
}
