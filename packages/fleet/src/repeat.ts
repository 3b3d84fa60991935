import type { Clock, Timer } from "@kv/interface";

/** Resolves as the work does, or with undefined after a time limit. */
export async function within<T>(
  clock: Clock,
  limitMs: number,
  work: Promise<T>,
): Promise<T | undefined> {
  let timer: Timer | undefined;
  const late = new Promise<undefined>((resolve) => {
    timer = clock.setTimer(() => resolve(undefined), limitMs, { ref: true });
  });
  return await Promise.race([work, late]).finally(() => timer?.cancel());
}

/**
 * Runs a task until `close`: at once, and as many milliseconds after each end as it returns. A task
 * never rejects, and asks `isClosed` after it waited.
 */
export function repeat(
  clock: Clock,
  task: (isClosed: () => boolean) => Promise<number>,
): { close(): void } {
  let timer: Timer | undefined;
  let closed = false;
  async function run(): Promise<void> {
    const waitMs = await task(() => closed);
    if (!closed) timer = clock.setTimer(() => void run(), waitMs);
  }
  void run();
  return {
    close() {
      closed = true;
      timer?.cancel();
    },
  };
}
