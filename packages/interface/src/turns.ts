import { type Clock, systemClock } from "./ambient.js";

/** Each turn is followed by so many times its duration without one. */
const REST = 3;
/** Enough for any part; a process that was stopped during a part goes on soon. */
const MOST_REST_MS = 1000;

/**
 * Spreads work over turns of the event loop, so that others are served between its parts. The order is that of the calls. The parts, with what
 * they do before they wait for something, take at most a quarter of the time.
 */
export class Turns {
  readonly #perTurn: number;
  readonly #clock: Clock;
  readonly #waiting: (() => void)[] = [];
  #isBusy = false;

  /** `perTurn`: parts that run in one turn. */
  constructor(perTurn: number, clock: Clock = systemClock()) {
    this.#perTurn = perTurn;
    this.#clock = clock;
  }

  /** Runs `part` in a later turn. */
  later(part: () => void): void {
    this.#waiting.push(part);
    if (!this.#isBusy) this.#begin();
  }

  /** Runs each step of `work` in a later turn, in turns with the other parts. Resolves with what it returns. */
  run<T>(work: Iterator<unknown, T>): Promise<T> {
    return new Promise((resolve, reject) => {
      const step = () => {
        try {
          const { done, value } = work.next();
          if (done === true) resolve(value);
          else this.later(step);
        } catch (error) {
          reject(error);
        }
      };
      this.later(step);
    });
  }

  #begin(): void {
    this.#isBusy = true;
    let begunMs = 0;
    setImmediate(() => {
      begunMs = this.#clock.now();
      for (const part of this.#waiting.splice(0, this.#perTurn)) part();
    });
    // In the same phase of the event loop, when the promises that the parts have resolved are through.
    setImmediate(() => this.#rest(this.#clock.now() - begunMs));
  }

  #rest(tookMs: number): void {
    const restMs = Math.min(MOST_REST_MS, Math.floor(REST * tookMs));
    if (restMs > 0) this.#clock.setTimer(() => this.#end(), restMs, { ref: true });
    else this.#end();
  }

  #end(): void {
    this.#isBusy = false;
    if (this.#waiting.length > 0) this.#begin();
  }
}
