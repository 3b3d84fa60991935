import { type Clock, KvError, type Timer } from "@kv/interface";

/**
 * What ends a request early: its client went away, its time is up, one of its phases took too long, the proxy closes. Whoever
 * waits does so under `signal`, and `signal.reason` is the `KvError` that says which it was.
 */
export interface Deadline {
  readonly signal: AbortSignal;
  /** Begins a phase, in place of the one before. */
  enter(phase: string, timeoutMs: number): void;
  /** Ends the phase; until the next one only the whole request is timed. */
  pause(): void;
  abort(reason: KvError): void;
  /** A deadline with phases of its own that ends with this one at the latest. */
  fork(): Deadline;
  close(): void;
}

export function createDeadline({ clock, requestMs }: { clock: Clock; requestMs?: number }): Deadline {
  const controller = new AbortController();
  let phaseTimer: Timer | undefined;
  const expire = (what: string, timeoutMs: number) =>
    clock.setTimer(() => {
      const message = `${what} took longer than ${timeoutMs} ms`;
      abort(new KvError("KV_REQUEST_TIMEOUT", message, { details: { phase: what, timeoutMs } }));
    }, timeoutMs);
  const total = requestMs === undefined ? undefined : expire("the request", requestMs);

  function pause(): void {
    phaseTimer?.cancel();
    phaseTimer = undefined;
  }
  function close(): void {
    pause();
    total?.cancel();
  }
  function abort(reason: KvError): void {
    close();
    if (!controller.signal.aborted) controller.abort(reason);
  }
  return {
    signal: controller.signal,
    enter(phase, timeoutMs) {
      pause();
      if (!controller.signal.aborted) phaseTimer = expire(phase, timeoutMs);
    },
    pause,
    abort,
    fork() {
      const child = createDeadline({ clock });
      const follow = () => child.abort(controller.signal.reason as KvError);
      if (controller.signal.aborted) follow();
      else controller.signal.addEventListener("abort", follow, { once: true });
      return {
        ...child,
        close() {
          controller.signal.removeEventListener("abort", follow);
          child.close();
        },
      };
    },
    close,
  };
}

/** The reason when the deadline has struck, else the error itself: what is thrown while aborting says nothing of why. */
export function whyEnded(deadline: Deadline, error: unknown): unknown {
  return deadline.signal.aborted ? deadline.signal.reason : error;
}
