/**
 * Clients take at most half of `every` requests before a successor has started: the number of
 * deaths is the same on any machine.
 */
export class DeathsByRequests {
  readonly #every: number;
  #point: number;
  #taken = 0;
  #wake: (() => void) | undefined;
  #waiting: (() => void)[] = [];
  ended = false;

  constructor(every: number) {
    this.#every = every;
    this.#point = every;
  }

  /** Waits while no client may take its next request. */
  mayTake(taken: number): Promise<void> | void {
    this.#taken = taken;
    if (taken >= this.#point) this.#wake?.();
    if (taken < this.#point + this.#every / 2) return;
    return new Promise((resolve) => void this.#waiting.push(resolve));
  }

  async next(): Promise<void> {
    if (this.#taken < this.#point && !this.ended)
      await new Promise<void>((resolve) => {
        this.#wake = resolve;
      });
    this.#wake = undefined;
  }

  over(): void {
    this.#point += this.#every;
    for (const resolve of this.#waiting.splice(0)) resolve();
  }

  end(): void {
    this.ended = true;
    this.#wake?.();
  }
}
