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

interface Expiry {
  readonly what: string;
  readonly timeoutMs: number;
  readonly atMs: number;
}

export interface DeadlineOptions {
  readonly clock: Clock;
  readonly requestMs?: number;
  /** Ends this one with it. */
  readonly parent?: Ending;
}

export function createDeadline({ clock, requestMs, parent }: DeadlineOptions): Deadline {
  const ending = createEnding();
  const expiry = (what: string, timeoutMs: number): Expiry => ({
    what,
    timeoutMs,
    atMs: clock.now() + timeoutMs,
  });
  const total = requestMs === undefined ? undefined : expiry("the request", requestMs);
  let phase: Expiry | undefined;
  // Phases come and go by the thousand, and hardly one expires: a timer is set once, and when it strikes it looks what is due.
  let timer: (Timer & { readonly atMs: number }) | undefined;
  let closed = false;
  let leaveParent: (() => void) | undefined;

  function arm(atMs: number): void {
    if (closed || (timer !== undefined && timer.atMs <= atMs)) return;
    timer?.cancel();
    const { cancel } = clock.setTimer(strike, Math.max(0, atMs - clock.now()));
    timer = { cancel, atMs };
  }
  function strike(): void {
    // A timer may strike a fraction of a millisecond early.
    const nowMs = clock.now() + 1;
    timer = undefined;
    const due = [phase, total].find((one) => one !== undefined && one.atMs <= nowMs);
    if (due !== undefined) {
      const { what, timeoutMs } = due;
      const message = `${what} took longer than ${timeoutMs} ms`;
      abort(new KvError("KV_REQUEST_TIMEOUT", message, { details: { phase: what, timeoutMs } }));
      return;
    }
    for (const one of [phase, total]) if (one !== undefined) arm(one.atMs);
  }
  if (total !== undefined) arm(total.atMs);

  function pause(): void {
    phase = undefined;
  }
  function close(): void {
    closed = true;
    pause();
    leaveParent?.();
    timer?.cancel();
    timer = undefined;
  }
  function abort(reason: KvError): void {
    close();
    ending.end(reason);
  }
  if (parent !== undefined) {
    leaveParent = parent.onEnd(() => {
      if (parent.reason !== undefined) abort(parent.reason);
    });
  }
  const deadline: Deadline = {
    get ended() {
      return ending.ended;
    },
    get reason() {
      return ending.reason;
    },
    get signal() {
      return ending.signal;
    },
    onEnd: ending.onEnd,
    enter(what, timeoutMs) {
      if (closed) return;
      phase = expiry(what, timeoutMs);
      arm(phase.atMs);
    },
    pause,
    abort,
    fork: () => createDeadline({ clock, parent: deadline }),
    close,
  };
  return deadline;
}

/** The reason when the deadline has struck, else the error itself: what is thrown while aborting says nothing of why. */
export function whyEnded(deadline: Deadline, error: unknown): unknown {
  return deadline.reason ?? error;
}
