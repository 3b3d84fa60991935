import type { Clock } from "./ambient.js";

/** After work that took `n` ms, the queue leaves the event loop to others for 3 · `n` ms. */
const IDLE_PER_BUSY = 3;
/** A process that was stopped during a step goes on soon. */
const MAX_IDLE_MS = 1000;

/** Options of a `YieldingQueue`. */
export interface YieldingQueueOptions {
  /** Measures the steps, and waits between them. */
  readonly clock: Clock;
  /**
   * Steps that run in one turn of the event loop.
   * @default 1
   */
  readonly stepsPerTurn?: number | undefined;
  /**
   * For how many ms a step of `run` calls `next()` again: for work whose `next()` takes
   * microseconds. 0: once.
   * @default 0
   */
  readonly sliceMs?: number | undefined;
}

/**
 * Runs long work in steps, in order, and yields to the event loop between them, so that other
 * requests are served meanwhile. The steps take at most a quarter of the time, with the promise
 * callbacks that they cause.
 */
export class YieldingQueue {
  readonly #clock: Clock;
  readonly #stepsPerTurn: number;
  readonly #sliceMs: number;
  readonly #waiting: (() => void)[] = [];
  #isBusy = false;
  /** What short steps have left to be waited for, less than a millisecond. */
  #owedMs = 0;

  constructor({ clock, stepsPerTurn = 1, sliceMs = 0 }: YieldingQueueOptions) {
    this.#clock = clock;
    this.#stepsPerTurn = stepsPerTurn;
    this.#sliceMs = sliceMs;
  }

  /** Steps that wait. */
  get length(): number {
    return this.#waiting.length;
  }

  /** Runs `step` in a later turn of the event loop. */
  push(step: () => void): void {
    this.#waiting.push(step);
    if (!this.#isBusy) this.#runTurn();
  }

  /** Resolves in a later turn of the event loop; what its caller does then is a step. */
  turn(): Promise<void> {
    return new Promise((resolve) => this.push(resolve));
  }

  /**
   * Runs `work` up to its end, each `next()` as a step of its own, or as many as `sliceMs` allows.
   * Resolves with what it returns, and rejects with what it throws.
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
    // Node runs both immediates in one turn, and between them the callbacks of the promises that
    // the steps resolved.
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
