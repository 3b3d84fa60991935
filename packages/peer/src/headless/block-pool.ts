/** Never lends block 0, vLLM's null block. */
export class BlockPool {
  readonly #numBlocks: number;
  readonly #free: number[];
  readonly #waiting: { count: number; resolve: (ids: readonly number[]) => void }[] = [];

  constructor(numBlocks: number) {
    this.#numBlocks = numBlocks;
    this.#free = Array.from({ length: numBlocks - 1 }, (_, index) => index + 1);
  }

  get free(): number {
    return this.#free.length;
  }

  /**
   * First come, first served.
   *
   * @throws `RangeError` for more than the pool has.
   */
  async take(count: number): Promise<readonly number[]> {
    if (count > this.#numBlocks - 1)
      throw new RangeError(`${count} blocks were requested from a pool of ${this.#numBlocks - 1}`);
    return await new Promise((resolve) => {
      this.#waiting.push({ count, resolve });
      this.#serve();
    });
  }

  give(ids: readonly number[]): void {
    this.#free.push(...ids);
    this.#serve();
  }

  #serve(): void {
    const waiting = this.#waiting;
    for (
      let [first] = waiting;
      first !== undefined && this.#free.length >= first.count;
      [first] = waiting
    ) {
      waiting.shift();
      first.resolve(this.#free.splice(0, first.count));
    }
  }
}

export function splitByGroup(ids: readonly number[], lengths: readonly number[]): number[][] {
  let from = 0;
  return lengths.map((length) => {
    from += length;
    return ids.slice(from - length, from);
  });
}
