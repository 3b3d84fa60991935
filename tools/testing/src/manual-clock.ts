import type { Clock } from "@kv/interface";

/** Timers fire in the order of their time. */
export function manualClock(startMs = 0): Clock & { advance(ms: number): void; pending(): number } {
  let nowMs = startMs;
  let order = 0;
  const timers = new Map<number, { atMs: number; run: () => void }>();
  return {
    now: () => nowMs,
    setTimer(run, delayMs) {
      const key = order++;
      timers.set(key, { atMs: nowMs + Math.max(0, delayMs), run });
      return { cancel: () => void timers.delete(key) };
    },
    advance(ms) {
      const endMs = nowMs + ms;
      for (;;) {
        let next: [number, { atMs: number; run: () => void }] | undefined;
        for (const entry of timers)
          if (next === undefined || entry[1].atMs < next[1].atMs) next = entry;
        if (next === undefined || next[1].atMs > endMs) break;
        timers.delete(next[0]);
        nowMs = next[1].atMs;
        next[1].run();
      }
      nowMs = endMs;
    },
    pending: () => timers.size,
  };
}

export function after<T>(clock: { advance(ms: number): void }, ms: number, look: () => T): () => T {
  return () => {
    clock.advance(ms);
    return look();
  };
}
