/** Allocates the most recently freed block first: one freed too early is overwritten soon. */
export function createBlockPool(
  count: number,
  hooks: { allocated(blockId: number): void; freed(blockId: number): void },
  order: readonly number[] = Array.from({ length: count }, (_, id) => id),
) {
  const free = [...order].reverse();
  const used = new Set<number>();
  return {
    allocate(wanted: number): number[] | undefined {
      if (free.length < wanted) return undefined;
      const taken = free.splice(free.length - wanted, wanted).reverse();
      for (const id of taken) {
        used.add(id);
        hooks.allocated(id);
      }
      return taken;
    },
    free(blockIds: readonly number[]): void {
      for (const id of blockIds) {
        if (!used.delete(id)) throw new Error(`block ${id} is freed and was not in use`);
        hooks.freed(id);
        free.push(id);
      }
    },
    isUsed: (blockId: number) => used.has(blockId),
    get used(): number {
      return used.size;
    },
  };
}
