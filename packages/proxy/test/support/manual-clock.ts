import type { Clock } from "@kv/interface";

/** A clock that stands still until it is moved; timers run when it passes them. */
export function createManualClock(): Clock & { advance(ms: number): void } {
  let nowMs = 0;
  const timers = new Map<object, { atMs: number; run: () => void }>();
  return {
    now: () => nowMs,
    setTimer(run, delayMs) {
      const timer = { cancel: () => void timers.delete(timer) };
      timers.set(timer, { atMs: nowMs + delayMs, run });
      return timer;
    },
    advance(ms) {
      nowMs += ms;
      for (const [timer, { atMs, run }] of timers) {
        if (atMs > nowMs) continue;
        timers.delete(timer);
        run();
      }
    },
  };
}

/** Moves the clock, then looks: for `expect.poll`. */
export function after<T>(clock: { advance(ms: number): void }, ms: number, look: () => T): () => T {
  return () => {
    clock.advance(ms);
    return look();
  };
}
