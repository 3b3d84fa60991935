import { type Clock, KvError, type Timer } from "@kv/interface";

const nothing = () => {};

/**
 * An abort that creates an `AbortSignal` only when `signal` is read. Each leg of each request
 * listens for one, and hardly any reads the signal.
 */
export class LazyAbort {
  #reason: KvError | undefined = undefined;
  #controller: AbortController | undefined = undefined;
  #listeners: (() => void)[] | undefined = undefined;

  /** Whether `abort` was called. */
  get aborted(): boolean {
    return this.#reason !== undefined;
  }

  /** Undefined until it is aborted. */
  get reason(): KvError | undefined {
    return this.#reason;
  }

  /** For calls that take an `AbortSignal`. The signal's reason is `reason`. */
  get signal(): AbortSignal {
    if (this.#controller === undefined) {
      this.#controller = new AbortController();
      if (this.#reason !== undefined) this.#controller.abort(this.#reason);
    }
    return this.#controller.signal;
  }

  /**
   * Calls `listener` once, at the abort, or at once after it. Returns a function that removes the
   * listener.
   */
  onAbort(listener: () => void): () => void {
    if (this.#reason !== undefined) {
      listener();
      return nothing;
    }
    this.#listeners ??= [];
    this.#listeners.push(listener);
    return () => this.#remove(listener);
  }

  /** Aborts, unless that has happened already: the first reason stays. */
  abort(reason: KvError): void {
    if (this.#reason !== undefined) return;
    this.#reason = reason;
    this.#controller?.abort(reason);
    const listeners = this.#listeners ?? [];
    this.#listeners = undefined;
    for (const listener of listeners) listener();
  }

  #remove(listener: () => void): void {
    const at = this.#listeners?.indexOf(listener) ?? -1;
    if (at !== -1) this.#listeners?.splice(at, 1);
  }
}

export interface DeadlineOptions {
  readonly clock: Clock;
  /** Time limit of the whole request, in milliseconds; none by default. */
  readonly requestMs?: number | undefined;
  /** Aborts this deadline when it aborts. */
  readonly parent?: LazyAbort | undefined;
}

/**
 * Phases begin and end by the thousand, and hardly one expires. So one timer is set for many phases
 * and checks at most this much later what is due; only a phase that expires before that sets
 * another.
 */
const MAX_TIMER_MS = 30_000;

/**
 * The time limits of a request and of its present phase. It aborts when one of them expires, and by
 * `abort`: the client disconnects, or the proxy closes.
 */
export class Deadline extends LazyAbort {
  readonly #clock: Clock;
  readonly #requestMs: number;
  readonly #requestEndsAtMs: number;
  readonly #leaveParent: (() => void) | undefined;
  #phase = "";
  #phaseMs = 0;
  #phaseEndsAtMs = Number.POSITIVE_INFINITY;
  #timer: Timer | undefined = undefined;
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

  /** Begins a phase, in place of the one before. `phase` names it in the error. */
  startPhase(phase: string, timeoutMs: number): void {
    if (this.#closed) return;
    const nowMs = this.#clock.now();
    this.#phase = phase;
    this.#phaseMs = timeoutMs;
    this.#phaseEndsAtMs = nowMs + timeoutMs;
    this.#setTimer(this.#phaseEndsAtMs, nowMs);
  }

  /** Ends the phase. Until the next one only the whole request has a time limit. */
  endPhase(): void {
    this.#phaseEndsAtMs = Number.POSITIVE_INFINITY;
    // Forks are often not closed. The timer would keep a fork, and all its listeners, in memory.
    if (this.#requestEndsAtMs === Number.POSITIVE_INFINITY) this.#cancelTimer();
  }

  override abort(reason: KvError): void {
    this.close();
    super.abort(reason);
  }

  /** A deadline with phases of its own that aborts with this one at the latest. */
  fork(): Deadline {
    return new Deadline({ clock: this.#clock, parent: this });
  }

  /** The reason of the abort, else `error`: an error that an abort has caused does not say why. */
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

  /** As `close`. */
  [Symbol.dispose](): void {
    this.close();
  }

  /** Makes sure that the timer runs at `atMs` at the latest. */
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
    // A timer may run a fraction of a millisecond early.
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
