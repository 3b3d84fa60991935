import type { Clock, Timer } from "@kv/interface";

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
