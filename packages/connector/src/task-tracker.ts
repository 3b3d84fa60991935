import type { Clock, Timer } from "@kv/interface";

/** Background work of a worker that is waited for only when the worker closes. */
export class TaskTracker {
  readonly #tasks = new Set<Promise<void>>();

  /** Tracks work, which must never reject. */
  track(work: Promise<void>): void {
    const tracked = work.finally(() => this.#tasks.delete(tracked));
    this.#tasks.add(tracked);
  }

  /** Number of unfinished tasks. */
  get size(): number {
    return this.#tasks.size;
  }

  /** Resolves when no task is left, including tasks that are added meanwhile. */
  async idle(): Promise<void> {
    while (this.#tasks.size > 0) await Promise.all(this.#tasks);
  }
}

/**
 * How long `close` waits for transfers, in ms: a transport may hang on a dead peer. Closing the
 * agent ends the rest.
 */
export const CLOSE_GRACE_MS = 10_000;

/**
 * Waits until all parts are idle, at most `CLOSE_GRACE_MS`. Resolves with false when the time ran
 * out.
 */
export async function idleWithinGrace(
  clock: Clock,
  parts: readonly Pick<TaskTracker, "size" | "idle">[],
): Promise<boolean> {
  let isLate = false;
  let timer: Timer | undefined;
  const grace = new Promise<void>((resolve) => {
    timer = clock.setTimer(() => {
      isLate = true;
      resolve();
    }, CLOSE_GRACE_MS);
  });
  while (!isLate && parts.some(({ size }) => size > 0)) {
    await Promise.race([Promise.all(parts.map((part) => part.idle())), grace]);
  }
  timer?.cancel();
  return !isLate;
}

/**
 * Rejects with the signal's reason as soon as it aborts. A result that arrives after that is given
 * to `unwanted`. Errors: those of `work`; the signal's reason.
 */
export function whileNotAborted<T>(
  work: Promise<T>,
  signal: AbortSignal | undefined,
  unwanted?: (result: T) => void,
): Promise<T> {
  if (signal === undefined) return work;
  return new Promise((resolve, reject) => {
    const onAbort = () => reject(signal.reason as Error);
    if (signal.aborted) onAbort();
    else signal.addEventListener("abort", onAbort);
    work.then(
      (result) => {
        signal.removeEventListener("abort", onAbort);
        if (signal.aborted) unwanted?.(result);
        else resolve(result);
      },
      (error: unknown) => {
        signal.removeEventListener("abort", onAbort);
        reject(error as Error);
      },
    );
  });
}
