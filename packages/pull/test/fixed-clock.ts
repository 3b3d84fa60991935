import type { Clock } from "@kv/interface";

/** A clock that stands still until told; timers fire when it is moved on. */
export function fixedClock(startMs = 0): Clock & { advance(ms: number): void; pending(): number } {
  let nowMs = startMs;
  const timers = new Set<{ atMs: number; run: () => void }>();
  return {
    now: () => nowMs,
    setTimer(run, delayMs) {
      const timer = { atMs: nowMs + delayMs, run };
      timers.add(timer);
      return { cancel: () => void timers.delete(timer) };
    },
    advance(ms) {
      nowMs += ms;
      for (const timer of [...timers].sort((a, b) => a.atMs - b.atMs)) {
        if (timer.atMs > nowMs || !timers.delete(timer)) continue;
        timer.run();
      }
    },
    pending: () => timers.size,
  };
}
