import type { Clock } from "./ambient.js";

/** After `n` ms of work, the queue leaves the event loop to others for 3 · `n` ms. */
const IDLE_PER_BUSY = 3;
/** Limits the wait after a process was stopped during a step. */
const MAX_IDLE_MS = 1000;

/** Options of a `YieldingQueue`. */
export interface YieldingQueueOptions {
  readonly clock: Clock;
  /**
   * Steps in one turn of the event loop.
   * @default 1
   */
  readonly stepsPerTurn?: number | undefined;
  /**
   * How many ms a step of `run` repeats a `next()` of microseconds. 0: once.
   * @default 0
   */
  readonly sliceMs?: number | undefined;
}

/**
 * Runs long work in steps, in order, and yields to the event loop between them. Steps and their
 * promise callbacks take at most a quarter of the time.
 */
export class YieldingQueue {
  readonly #clock: Clock;
  readonly #stepsPerTurn: number;
  readonly #sliceMs: number;
  readonly #waiting: (() => void)[] = [];
  #isBusy = false;
  /** Idle time below a millisecond that short steps still owe. */
  #owedMs = 0;

  constructor({ clock, stepsPerTurn = 1, sliceMs = 0 }: YieldingQueueOptions) {
    this.#clock = clock;
    this.#stepsPerTurn = stepsPerTurn;
    this.#sliceMs = sliceMs;
  }

  get length(): number {
    return this.#waiting.length;
  }

  /** Runs `step` in a later turn of the event loop. */
  push(step: () => void): void {
    this.#waiting.push(step);
    if (!this.#isBusy) this.#runTurn();
  }

  /** Resolves in a later turn of the event loop; what the caller does then is a step. */
  turn(): Promise<void> {
    return new Promise((resolve) => this.push(resolve));
  }

  /**
   * Runs `work` to its end in steps of one `next()`, or as many as `sliceMs` allows. Resolves and
   * rejects as `work` does.
   */
  run<T>(work: Iterator<unknown, T>): Promise<T> {
    return new Promise((resolve, reject) => {
      const step = () => {
        try {
          const startedMs = this.#clock.now();
          let next = work.next();
          while (next.done !== true && this.#clock.now() - startedMs < this.#sliceMs)
            next = work.next();
          if (next.done === true) resolve(next.value);
          else this.push(step);
        } catch (error) {
          reject(error);
        }
      };
      this.push(step);
    });
  }

  #runTurn(): void {
    this.#isBusy = true;
    let startedMs = 0;
    setImmediate(() => {
      startedMs = this.#clock.now();
      for (const step of this.#waiting.splice(0, this.#stepsPerTurn)) step();
    });
    // Node runs both immediates in one turn, and between them the promise callbacks of the steps.
    setImmediate(() => this.#yield(this.#clock.now() - startedMs));
  }

  #yield(busyMs: number): void {
    const owedMs = Math.min(MAX_IDLE_MS, this.#owedMs + IDLE_PER_BUSY * busyMs);
    const idleMs = Math.floor(owedMs);
    this.#owedMs = owedMs - idleMs;
    if (idleMs > 0) this.#clock.setTimer(() => this.#goOn(), idleMs, { ref: true });
    else this.#goOn();
  }

  #goOn(): void {
    this.#isBusy = false;
    if (this.#waiting.length > 0) this.#runTurn();
  }
}
