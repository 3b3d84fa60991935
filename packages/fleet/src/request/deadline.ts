import { type Clock, KvError, type Timer } from "@kv/interface";

/** Options of `Deadline`. */
export interface DeadlineOptions {
  readonly clock: Clock;
  /** Time limit of the whole request, in milliseconds. @default Number.POSITIVE_INFINITY */
  readonly requestMs?: number | undefined;
  /** Its abort aborts this deadline. */
  readonly parent?: Deadline | undefined;
}

/**
 * Few phases expire, so one timer checks for many at most this late. Only a phase that expires
 * earlier sets another.
 */
const MAX_TIMER_MS = 30_000;

/**
 * Limits the time of a request and of its present phase. It aborts when one expires, or by `abort`.
 * An `AbortSignal` would cost each leg more.
 */
export class Deadline {
  #reason: KvError | undefined;
  readonly #listeners = new Set<(reason: KvError) => void>();
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
    this.#clock = clock;
    this.#requestMs = requestMs;
    const nowMs = clock.now();
    this.#requestEndsAtMs = nowMs + requestMs;
    this.#leaveParent = parent?.onAbort((reason) => this.abort(reason));
    this.#setTimer(this.#requestEndsAtMs, nowMs);
  }

  get aborted(): boolean {
    return this.#reason !== undefined;
  }

  /** Undefined until the abort. */
  get reason(): KvError | undefined {
    return this.#reason;
  }

  /** @throws The reason of the abort. */
  throwIfAborted(): void {
    if (this.#reason !== undefined) throw this.#reason;
  }

  /**
   * Calls `listener` once, at the abort or at once after it. Returns a function that removes it.
   */
  onAbort(listener: (reason: KvError) => void): () => void {
    if (this.#reason !== undefined) listener(this.#reason);
    else this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
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

  /** The first reason stays. */
  abort(reason: KvError): void {
    this.close();
    if (this.#reason !== undefined) return;
    this.#reason = reason;
    const listeners = [...this.#listeners];
    this.#listeners.clear();
    for (const listener of listeners) listener(reason);
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
