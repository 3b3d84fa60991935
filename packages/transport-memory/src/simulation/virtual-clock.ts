import { type Clock, KvError } from "@kv/interface";
import { macrotaskTurn } from "./macrotask.js";
import { timerQueue } from "./timer-queue.js";

export interface VirtualClockOptions {
  /** What `now()` answers at first; 0 by default. */
  startMs?: number;
  /**
   * Lets everything that is ready run before time moves on. One macrotask by default, which drains all promise work; give
   * one that waits longer where the code under test yields by macrotasks or by native work of its own.
   */
  turn?: () => Promise<void>;
}

/** Time that moves only when told to. Timers fire by time, then in the order in which they were set. */
export interface VirtualClock extends Clock {
  /** Timers that are set and have not fired; what is left at the end of a test has leaked. */
  readonly pendingTimers: number;
  /** Moves time on by `ms`, firing what falls due, promise work drained before, between and after. */
  advance(ms: number): Promise<void>;
  /** Fires timers until `predicate` holds. `KV_INTERNAL` when `limitMs` has passed or no timer is left. */
  runUntil(predicate: () => boolean, options: { limitMs: number }): Promise<void>;
  /** Fires timers until `promise` settles, and answers with its outcome. Limits as `runUntil`. */
  settle<T>(promise: PromiseLike<T>, options?: { limitMs?: number }): Promise<T>;
  /** Fires timers until none is left. `KV_INTERNAL` when `limitMs` (one hour by default) has passed before that. */
  runUntilIdle(options?: { limitMs?: number }): Promise<void>;
}

/** Node fires a longer timer at once; real code must not set one. */
const LONGEST_DELAY_MS = 2 ** 31 - 1;
/** As many timers at one instant are taken for a loop of zero delays. */
const MOST_TIMERS_AT_ONE_TIME = 1_000_000;
const ONE_HOUR_MS = 3_600_000;

export function virtualClock(options: VirtualClockOptions = {}): VirtualClock {
  const queue = timerQueue();
  const drain = options.turn ?? macrotaskTurn();
  let nowMs = options.startMs ?? 0;
  let running = false;
  let firedAtThisTime = 0;

  async function alone<T>(what: string, body: () => Promise<T>): Promise<T> {
    if (running) throw new KvError("KV_INTERNAL", `${what}: the virtual clock is being run already`);
    running = true;
    try {
      return await body();
    } finally {
      running = false;
    }
  }

  /** Fires the next timer if it is due by `untilMs`; false when there is none. */
  async function fireNext(untilMs: number): Promise<boolean> {
    const next = queue.peek();
    if (next === undefined || next.atMs > untilMs) return false;
    queue.take();
    firedAtThisTime = next.atMs > nowMs ? 0 : firedAtThisTime + 1;
    if (firedAtThisTime > MOST_TIMERS_AT_ONE_TIME) {
      throw new KvError(
        "KV_INTERNAL",
        `${MOST_TIMERS_AT_ONE_TIME} timers fired at ${nowMs} ms: a loop of zero delays`,
      );
    }
    nowMs = Math.max(nowMs, next.atMs);
    next.run();
    await drain();
    return true;
  }

  async function until(what: string, predicate: () => boolean, limitMs: number): Promise<void> {
    const endMs = nowMs + limitMs;
    await drain();
    while (!predicate()) {
      if (await fireNext(endMs)) continue;
      const next = queue.peek();
      throw new KvError(
        "KV_INTERNAL",
        next === undefined
          ? `${what}: not so at ${nowMs} ms, and no timer is left that could change it`
          : `${what}: not so within ${limitMs} ms (now ${nowMs} ms, next of ${queue.size} timers at ${next.atMs} ms)`,
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
          `a timer of ${delayMs} ms: Node takes ${LONGEST_DELAY_MS} ms at most`,
        );
      }
      const timer = queue.add(run, nowMs + Math.max(0, delayMs));
      return { cancel: () => queue.cancel(timer) };
    },
    get pendingTimers() {
      return queue.size;
    },
    advance: (ms) =>
      alone("advance", async () => {
        const endMs = nowMs + ms;
        await drain();
        while (await fireNext(endMs));
        nowMs = Math.max(nowMs, endMs);
      }),
    runUntil: (predicate, { limitMs }) => alone("runUntil", () => until("runUntil", predicate, limitMs)),
    settle: (promise, { limitMs = ONE_HOUR_MS } = {}) =>
      alone("settle", async () => {
        let settled = false;
        const outcome = Promise.resolve(promise).finally(() => {
          settled = true;
        });
        // The outcome is awaited below; a rejection meanwhile is not an unhandled one.
        outcome.catch(() => {});
        await until("settle", () => settled, limitMs);
        return await outcome;
      }),
    runUntilIdle: ({ limitMs = ONE_HOUR_MS } = {}) =>
      alone("runUntilIdle", () => until("runUntilIdle", () => queue.size === 0, limitMs)),
  };
}
