/** Block ids of the mirror's cache, lent to requests. Block 0 is never lent: vLLM's null block. */
export interface BlockPool {
  /** Waits until there are so many. Throws when there can never be. */
  take(count: number): Promise<readonly number[]>;
  give(ids: readonly number[]): void;
  readonly free: number;
}

export function createBlockPool(numBlocks: number): BlockPool {
  const free = Array.from({ length: numBlocks - 1 }, (_, index) => index + 1);
  const waiting: { count: number; resolve: (ids: readonly number[]) => void }[] = [];

  function serve(): void {
    for (let first = waiting[0]; first !== undefined && free.length >= first.count; first = waiting[0]) {
      waiting.shift();
      first.resolve(free.splice(0, first.count));
    }
  }

  return {
    take(count) {
      if (count > numBlocks - 1) {
        return Promise.reject(
          new RangeError(`${count} blocks are more than the ${numBlocks - 1} of the pool`),
        );
      }
      return new Promise((resolve) => {
        waiting.push({ count, resolve });
        serve();
      });
    },
    give(ids) {
      free.push(...ids);
      serve();
    },
    get free() {
      return free.length;
    },
  };
}
