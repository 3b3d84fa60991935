/**
 * Blocks of a simulated engine. Allocates the most recently freed block first, so that a block
 * freed too early is overwritten as soon as possible.
 */
export interface BlockPool {
  /** Undefined when there are not enough free blocks. */
  allocate(count: number): number[] | undefined;
  free(blockIds: readonly number[]): void;
  isUsed(blockId: number): boolean;
  readonly used: number;
}

export function createBlockPool(
  count: number,
  hooks: { allocated(blockId: number): void; freed(blockId: number): void },
  /** Order in which the blocks are first allocated; ascending by default. */
  order: readonly number[] = Array.from({ length: count }, (_, id) => id),
): BlockPool {
  const free = [...order].reverse();
  const used = new Set<number>();
  return {
    allocate(wanted) {
      if (free.length < wanted) return undefined;
      const taken = free.splice(free.length - wanted, wanted).reverse();
      for (const id of taken) {
        used.add(id);
        hooks.allocated(id);
      }
      return taken;
    },
    free(blockIds) {
      for (const id of blockIds) {
        if (!used.delete(id)) throw new Error(`block ${id} is freed and was not in use`);
        hooks.freed(id);
        free.push(id);
      }
    },
    isUsed: (blockId) => used.has(blockId),
    get used() {
      return used.size;
    },
  };
}
