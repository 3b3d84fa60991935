/** Spreads work over turns of the event loop, so that others are served between its parts. The order is that of the calls. */
export class Turns {
  readonly #perTurn: number;
  #waiting: (() => void)[] = [];

  /** `perTurn`: parts that run in one turn. */
  constructor(perTurn: number) {
    this.#perTurn = perTurn;
  }

  /** Runs `part` in a later turn. */
  later(part: () => void): void {
    if (this.#waiting.push(part) === 1) setImmediate(() => this.#turn());
  }

  #turn(): void {
    const parts = this.#waiting.splice(0, this.#perTurn);
    if (this.#waiting.length > 0) setImmediate(() => this.#turn());
    for (const part of parts) part();
  }
}
