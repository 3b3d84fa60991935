import type { Clock, Timer } from "@kv/interface";

/** Work that nobody waits for until the end. */
export interface Background {
  /** `work` never rejects. */
  track(work: Promise<void>): void;
  readonly size: number;
  idle(): Promise<void>;
}

export function createBackground(): Background {
  const all = new Set<Promise<void>>();
  return {
    track(work) {
      const tracked = work.finally(() => all.delete(tracked));
      all.add(tracked);
    },
    get size() {
      return all.size;
    },
    async idle() {
      while (all.size > 0) await Promise.all(all);
    },
  };
}

/** A transport may hang on a dead peer: what has not ended by then is the agent's to end. */
export const CLOSE_GRACE_MS = 10_000;

/** Waits until nothing is left of any of these, but not longer than `CLOSE_GRACE_MS`; false when it was not waited for. */
export async function idleWithin(
  clock: Clock,
  parts: readonly Pick<Background, "size" | "idle">[],
): Promise<boolean> {
  let late = false;
  let timer: Timer | undefined;
  const grace = new Promise<void>((resolve) => {
    timer = clock.setTimer(() => {
      late = true;
      resolve();
    }, CLOSE_GRACE_MS);
  });
  while (!late && parts.some(({ size }) => size > 0)) {
    await Promise.race([Promise.all(parts.map((part) => part.idle())), grace]);
  }
  timer?.cancel();
  return !late;
}
