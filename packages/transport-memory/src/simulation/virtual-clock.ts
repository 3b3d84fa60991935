import { type Clock, KvError } from "@kv/interface";

/** Options of `virtualClock`. */
export interface VirtualClockOptions {
  /** @default 0 */
  startMs?: number | undefined;
  /**
   * Runs everything that is ready before time moves on. Pass a longer wait for code that yields by
   * macrotasks or native work. @default one macrotask, which drains all promise work
   */
  turn?: (() => Promise<void>) | undefined;
}

/**
 * A clock for tests, whose time moves only by its methods, one at a time. Timers fire by time, then
 * in the order in which they were set.
 */
export interface VirtualClock extends Clock {
  /** Timers neither fired nor cancelled. Those left after a test have leaked. */
  readonly pendingTimers: number;
  /** Moves time by `ms` and fires due timers. Drains promise work throughout. */
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

/** Node fires a timer with a longer delay at once. */
const LONGEST_DELAY_MS = 2 ** 31 - 1;
/** More count as an endless loop of zero delays. */
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

  async function fireNext(untilMs: number): Promise<boolean> {
    const next = queue.peek();
    if (next === undefined || next.atMs > untilMs) return false;
    queue.cancel(next);
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
        // It is awaited below, so an earlier rejection is handled.
        outcome.catch(() => {});
        await fireUntil("settle", () => settled, limitMs);
        return await outcome;
      }),
    runUntilIdle: ({ limitMs = ONE_HOUR_MS } = {}) =>
      exclusively("runUntilIdle", () => fireUntil("runUntilIdle", () => queue.size === 0, limitMs)),
  };
}

interface QueuedTimer {
  readonly atMs: number;
  readonly run: () => void;
  cancelled: boolean;
}

/**
 * Timers by time, then by insertion, in a sorted list: most new ones are the latest. Cancelled
 * timers are dropped when they outnumber the others.
 */
class TimerQueue {
  #timers: QueuedTimer[] = [];
  #first = 0;
  #live = 0;

  get size(): number {
    return this.#live;
  }

  add(run: () => void, atMs: number): QueuedTimer {
    const timer: QueuedTimer = { atMs, run, cancelled: false };
    let low = this.#first;
    let high = this.#timers.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((this.#timers[middle] as QueuedTimer).atMs <= atMs) low = middle + 1;
      else high = middle;
    }
    this.#timers.splice(low, 0, timer);
    this.#live += 1;
    return timer;
  }

  cancel(timer: QueuedTimer): void {
    if (timer.cancelled) return;
    timer.cancelled = true;
    this.#live -= 1;
    if (this.#timers.length <= 1024 || this.#timers.length <= 2 * this.#live) return;
    this.#timers = this.#timers.filter(({ cancelled }) => !cancelled);
    this.#first = 0;
  }

  peek(): QueuedTimer | undefined {
    while (this.#timers[this.#first]?.cancelled === true) this.#first += 1;
    return this.#timers[this.#first];
  }
}

/**
 * Resolves in a later macrotask, when all promise work is done. It prefers `setImmediate` (about 1
 * us a turn), then `MessageChannel`, then `setTimeout`, which browsers clamp to 4 ms.
 */
export function macrotaskTurn(): () => Promise<void> {
  const scope = globalThis as unknown as {
    setImmediate?: (run: () => void) => unknown;
    MessageChannel?: new () => { port1: Port; port2: Port };
  };
  if (typeof scope.setImmediate === "function") {
    const immediate = scope.setImmediate;
    return () => new Promise((resolve) => void immediate(resolve));
  }
  if (typeof scope.MessageChannel === "function") {
    const channel = scope.MessageChannel;
    // A port that stays open would keep the process alive.
    return () =>
      new Promise((resolve) => {
        const { port1, port2 } = new channel();
        port1.onmessage = () => {
          port1.close();
          resolve();
        };
        port2.postMessage(0);
      });
  }
  return () => new Promise((resolve) => void setTimeout(resolve, 0));
}

interface Port {
  onmessage: (() => void) | null;
  postMessage(value: unknown): void;
  close(): void;
}
