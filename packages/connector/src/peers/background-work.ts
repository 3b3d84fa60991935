import type { Clock, Span, SpanOptions, Timer, Tracer } from "@kv/interface";

/** Background work of a worker that is waited for only when the worker closes. */
export class TaskTracker {
  readonly #tasks = new Set<Promise<void>>();

  /** Tracks work, which must never reject. */
  track(work: Promise<void>): void {
    const tracked = work.finally(() => this.#tasks.delete(tracked));
    this.#tasks.add(tracked);
  }

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

/** Runs `work` in a span, which ends with it, or with the promise that it returns. */
export function traced<T>(
  tracer: Tracer | undefined,
  name: string,
  options: SpanOptions,
  work: (span: Span | undefined) => T,
): T {
  const span = tracer?.start(name, options);
  if (span === undefined) return work(undefined);
  const failed = (error: unknown) => span.end(error);
  try {
    const result = work(span);
    if (result instanceof Promise) result.then(() => span.end(), failed);
    else span.end();
    return result;
  } catch (error) {
    failed(error);
    throw error;
  }
}
