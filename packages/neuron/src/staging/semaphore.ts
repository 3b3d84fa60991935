/** Limits how many holders run at once; later callers wait in the order of arrival. */
export class Semaphore {
  readonly #waiting: (() => void)[] = [];
  #free: number;

  constructor(permits: number) {
    this.#free = permits;
  }

  /**
   * Resolves when a permit is free, with the function that releases it. Call that function once.
   */
  async acquire(): Promise<() => void> {
    if (this.#free > 0) this.#free -= 1;
    else await new Promise<void>((resolve) => void this.#waiting.push(resolve));
    return () => this.#release();
  }

  #release(): void {
    // A waiter inherits the permit directly, so that a later caller cannot overtake it.
    const next = this.#waiting.shift();
    if (next === undefined) this.#free += 1;
    else next();
  }
}
