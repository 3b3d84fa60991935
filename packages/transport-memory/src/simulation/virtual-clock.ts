import { type Clock, KvError } from "@kv/interface";
import { macrotaskTurn } from "./macrotask.js";
import { TimerQueue } from "./timer-queue.js";

/** Options of `virtualClock`. */
export interface VirtualClockOptions {
  /** First value of `now()`. @default 0 */
  startMs?: number | undefined;
  /**
   * Waits until everything that is ready has run, before time moves on. Pass a function that waits
   * longer where the code under test yields by macrotasks or native work. @default one macrotask,
   * which drains all promise work
   */
  turn?: (() => Promise<void>) | undefined;
}

/**
 * A clock for tests: time moves only by its methods. Timers fire by time, then in the order in
 * which they were set. Only one method may run at once.
 */
export interface VirtualClock extends Clock {
  /**
   * Timers that are set and have neither fired nor been cancelled. Those left at the end of a test
   * have leaked.
   */
  readonly pendingTimers: number;
  /**
   * Moves time by `ms` milliseconds and fires the timers that fall due. Promise work is drained
   * before, between and after.
   */
  advance(ms: number): Promise<void>;
  /**
   * Fires timers until `predicate` returns true.
   *
   * @throws `KV_INTERNAL` when `limitMs` has passed or no timer is left.
   */
  runUntil(predicate: () => boolean, options: { limitMs: number }): Promise<void>;
  /**
   * Fires timers until `promise` settles, and settles as it does.
   *
   * @throws As `runUntil`; `limitMs` defaults to one hour.
   */
  settle<T>(promise: PromiseLike<T>, options?: { limitMs?: number | undefined }): Promise<T>;
  /**
   * Fires timers until none is left.
   *
   * @throws `KV_INTERNAL` when `limitMs` (default: one hour) has passed before.
   */
  runUntilIdle(options?: { limitMs?: number | undefined }): Promise<void>;
}

/** Node fires a timer with a longer delay at once, so code must not set one. */
const LONGEST_DELAY_MS = 2 ** 31 - 1;
/** More timers at one instant count as an endless loop of zero delays. */
const MAX_TIMERS_AT_ONE_TIME = 1_000_000;
const ONE_HOUR_MS = 3_600_000;

/** Creates a virtual clock. */
export function virtualClock(options: VirtualClockOptions = {}): VirtualClock {
  const queue = new TimerQueue();
  const drain = options.turn ?? macrotaskTurn();
  let nowMs = options.startMs ?? 0;
  let running = false;
  let firedAtThisTime = 0;

  async function exclusively<T>(method: string, body: () => Promise<T>): Promise<T> {
    if (running)
      throw new KvError("KV_INTERNAL", `${method}: another method of the virtual clock is running`);
    running = true;
    try {
      return await body();
    } finally {
      running = false;
    }
  }

  /** Fires the next timer that is due by `untilMs`. Returns false when there is none. */
  async function fireNext(untilMs: number): Promise<boolean> {
    const next = queue.peek();
    if (next === undefined || next.atMs > untilMs) return false;
    queue.take();
    firedAtThisTime = next.atMs > nowMs ? 0 : firedAtThisTime + 1;
    if (firedAtThisTime > MAX_TIMERS_AT_ONE_TIME) {
      throw new KvError(
        "KV_INTERNAL",
        `${MAX_TIMERS_AT_ONE_TIME} timers fired at ${nowMs} ms: a loop of zero delays`,
      );
    }
    nowMs = Math.max(nowMs, next.atMs);
    next.run();
    await drain();
    return true;
  }

  async function fireUntil(
    method: string,
    predicate: () => boolean,
    limitMs: number,
  ): Promise<void> {
    const endMs = nowMs + limitMs;
    await drain();
    while (!predicate()) {
      if (await fireNext(endMs)) continue;
      const next = queue.peek();
      throw new KvError(
        "KV_INTERNAL",
        next === undefined
          ? `${method}: the condition is false at ${nowMs} ms and no timer is left`
          : `${method}: the condition is false after ${limitMs} ms (now ${nowMs} ms, next of ${queue.size} timers at ${next.atMs} ms)`,
        { details: { nowMs, limitMs, pendingTimers: queue.size } },
      );
    }
  }

  return {
    now: () => nowMs,
    setTimer(run, delayMs) {
      if (!(delayMs <= LONGEST_DELAY_MS)) {
        throw new KvError(
          "KV_INTERNAL",
          `invalid timer of ${delayMs} ms: the longest delay in Node is ${LONGEST_DELAY_MS} ms`,
        );
      }
      const timer = queue.add(run, nowMs + Math.max(0, delayMs));
      return { cancel: () => queue.cancel(timer) };
    },
    get pendingTimers() {
      return queue.size;
    },
    advance: (ms) =>
      exclusively("advance", async () => {
        const endMs = nowMs + ms;
        await drain();
        while (await fireNext(endMs));
        nowMs = Math.max(nowMs, endMs);
      }),
    runUntil: (predicate, { limitMs }) =>
      exclusively("runUntil", () => fireUntil("runUntil", predicate, limitMs)),
    settle: (promise, { limitMs = ONE_HOUR_MS } = {}) =>
      exclusively("settle", async () => {
        let settled = false;
        const outcome = Promise.resolve(promise).finally(() => {
          settled = true;
        });
        // The outcome is awaited below, so a rejection before that is not unhandled.
        outcome.catch(() => {});
        await fireUntil("settle", () => settled, limitMs);
        return await outcome;
      }),
    runUntilIdle: ({ limitMs = ONE_HOUR_MS } = {}) =>
      exclusively("runUntilIdle", () => fireUntil("runUntilIdle", () => queue.size === 0, limitMs)),
  };
}
