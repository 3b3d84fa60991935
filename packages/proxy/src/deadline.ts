import { type Clock, KvError, type Timer } from "@kv/interface";
import { createEnding, type Ending } from "./ending.js";

/**
 * What ends a request early: its client went away, its time is up, one of its phases took too long, the proxy closes; `reason` says
 * which it was.
 */
export interface Deadline extends Ending {
  /** Begins a phase, in place of the one before. */
  enter(phase: string, timeoutMs: number): void;
  /** Ends the phase; until the next one only the whole request is timed. */
  pause(): void;
  abort(reason: KvError): void;
  /** A deadline with phases of its own that ends with this one at the latest. */
  fork(): Deadline;
  close(): void;
}

export interface DeadlineOptions {
  readonly clock: Clock;
  readonly requestMs?: number;
  /** Ends this one with it. */
  readonly parent?: Ending;
}

export function createDeadline(options: DeadlineOptions): Deadline {
  return new TimedDeadline(options);
}

/**
 * Phases come and go by the thousand, and hardly one expires. So a timer is set once, to look what is due when it strikes, and only a phase
 * that would be over before that sets another.
 */
const LOOK_MS = 30_000;

/** A class, as every request has one: methods are then made once for all. */
class TimedDeadline implements Deadline {
  readonly #ending = createEnding();
  readonly #clock: Clock;
  readonly #requestMs: number;
  readonly #requestEndsAtMs: number;
  readonly #leaveParent: (() => void) | undefined;
  #phase = "";
  #phaseMs = 0;
  #phaseEndsAtMs = Number.POSITIVE_INFINITY;
  #timer: Timer | undefined = undefined;
  #strikesAtMs = Number.POSITIVE_INFINITY;
  #closed = false;

  constructor({ clock, requestMs = Number.POSITIVE_INFINITY, parent }: DeadlineOptions) {
    this.#clock = clock;
    this.#requestMs = requestMs;
    const nowMs = clock.now();
    this.#requestEndsAtMs = nowMs + requestMs;
    this.#leaveParent = parent?.onEnd(() => {
      if (parent.reason !== undefined) this.abort(parent.reason);
    });
    this.#watch(this.#requestEndsAtMs, nowMs);
  }

  get ended(): boolean {
    return this.#ending.ended;
  }

  get reason(): KvError | undefined {
    return this.#ending.reason;
  }

  get signal(): AbortSignal {
    return this.#ending.signal;
  }

  onEnd(listener: () => void): () => void {
    return this.#ending.onEnd(listener);
  }

  enter(phase: string, timeoutMs: number): void {
    if (this.#closed) return;
    const nowMs = this.#clock.now();
    this.#phase = phase;
    this.#phaseMs = timeoutMs;
    this.#phaseEndsAtMs = nowMs + timeoutMs;
    this.#watch(this.#phaseEndsAtMs, nowMs);
  }

  pause(): void {
    this.#phaseEndsAtMs = Number.POSITIVE_INFINITY;
    // A fork is often not closed, and its timer would keep it, and what waits for its end, for as long as nothing is due.
    if (this.#requestEndsAtMs === Number.POSITIVE_INFINITY) this.#cancel();
  }

  abort(reason: KvError): void {
    this.close();
    this.#ending.end(reason);
  }

  fork(): Deadline {
    return new TimedDeadline({ clock: this.#clock, parent: this });
  }

  close(): void {
    this.#closed = true;
    this.pause();
    this.#leaveParent?.();
    this.#cancel();
  }

  /** Sees to it that the timer strikes at `atMs` at the latest. */
  #watch(atMs: number, nowMs: number): void {
    if (this.#closed || atMs === Number.POSITIVE_INFINITY) return;
    const waitMs = Math.min(Math.max(0, atMs - nowMs), LOOK_MS);
    if (this.#strikesAtMs <= nowMs + waitMs) return;
    this.#cancel();
    this.#strikesAtMs = nowMs + waitMs;
    this.#timer = this.#clock.setTimer(() => this.#strike(), waitMs);
  }

  #cancel(): void {
    this.#timer?.cancel();
    this.#timer = undefined;
    this.#strikesAtMs = Number.POSITIVE_INFINITY;
  }

  #strike(): void {
    this.#timer = undefined;
    this.#strikesAtMs = Number.POSITIVE_INFINITY;
    const nowMs = this.#clock.now();
    // A timer may strike a fraction of a millisecond early.
    const dueMs = nowMs + 1;
    if (this.#phaseEndsAtMs <= dueMs) this.#expire(this.#phase, this.#phaseMs);
    else if (this.#requestEndsAtMs <= dueMs) this.#expire("the request", this.#requestMs);
    else this.#watch(Math.min(this.#phaseEndsAtMs, this.#requestEndsAtMs), nowMs);
  }

  #expire(phase: string, timeoutMs: number): void {
    const message = `${phase} took longer than ${timeoutMs} ms`;
    this.abort(new KvError("KV_REQUEST_TIMEOUT", message, { details: { phase, timeoutMs } }));
  }
}

/** The reason when the deadline has struck, else the error itself: what is thrown while aborting says nothing of why. */
export function whyEnded(deadline: Deadline, error: unknown): unknown {
  return deadline.reason ?? error;
}
