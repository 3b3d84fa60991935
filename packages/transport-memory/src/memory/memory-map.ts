/** A range of addresses. */
interface Span {
  readonly address: number;
  readonly lengthBytes: number;
}

/**
 * Memories sorted by address. Lookups check the last result first, because consecutive descriptors
 * mostly lie in one memory.
 */
export interface MemoryMap<T extends Span> {
  readonly size: number;
  add(memory: T): void;
  delete(memory: T): void;
  /** Returns the memory that contains all of `[address, address + lengthBytes)`. */
  find(address: number, lengthBytes: number): T | undefined;
  values(): readonly T[];
}

export function memoryMap<T extends Span>(initial: readonly T[] = []): MemoryMap<T> {
  const sorted: T[] = [...initial].sort((a, b) => a.address - b.address);
  let last: T | undefined;

  const holds = (memory: T, address: number, lengthBytes: number): boolean =>
    address >= memory.address && address + lengthBytes <= memory.address + memory.lengthBytes;

  /** Returns the index of the first memory that begins after `address`. */
  function after(address: number): number {
    let low = 0;
    let high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((sorted[middle] as T).address <= address) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  return {
    get size() {
      return sorted.length;
    },
    add(memory) {
      sorted.splice(after(memory.address), 0, memory);
    },
    delete(memory) {
      const index = sorted.indexOf(memory);
      if (index >= 0) sorted.splice(index, 1);
      last = undefined;
    },
    find(address, lengthBytes) {
      if (last !== undefined && holds(last, address, lengthBytes)) return last;
      const candidate = sorted[after(address) - 1];
      if (candidate === undefined || !holds(candidate, address, lengthBytes)) return undefined;
      last = candidate;
      return candidate;
    },
    values: () => sorted,
  };
}
