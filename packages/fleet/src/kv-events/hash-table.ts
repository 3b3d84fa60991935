const TABLES = 256;
const FIRST_LENGTH = 16;
const MAX_LOAD_FACTOR = 0.75;
const NO_NUMBERS = new Uint32Array(1);

interface Table {
  numbers: Uint32Array;
  size: number;
}

/**
 * Numbers above 0, found by a hash, at 5 to 11 bytes each. A `Map` takes several times as much, and
 * a router follows millions of blocks.
 */
export class HashTable {
  /** By the first bits of a hash. Each grows alone, so that no addition takes long. */
  readonly #tables: readonly Table[];
  #numbers: Uint32Array = NO_NUMBERS;
  #at = 0;

  constructor(private readonly hashOf: (number: number) => number) {
    this.#tables = Array.from({ length: TABLES }, () => ({ numbers: NO_NUMBERS, size: 0 }));
  }

  first(hash: number): number {
    this.#numbers = this.#tableOf(hash).numbers;
    this.#at = hash & (this.#numbers.length - 1);
    return this.#numbers[this.#at] ?? 0;
  }

  next(): number {
    this.#at = (this.#at + 1) & (this.#numbers.length - 1);
    return this.#numbers[this.#at] ?? 0;
  }

  add(number: number): void {
    const hash = this.hashOf(number);
    const table = this.#tableOf(hash);
    const { numbers } = table;
    table.size += 1;
    if (table.size > numbers.length * MAX_LOAD_FACTOR) {
      table.numbers = new Uint32Array(Math.max(FIRST_LENGTH, 2 * numbers.length));
      for (const moved of numbers) if (moved !== 0) this.#insert(moved, this.hashOf(moved));
    }
    this.#insert(number, hash);
  }

  /** Moves up later entries that a search would miss. */
  remove(number: number): void {
    const hash = this.hashOf(number);
    const table = this.#tableOf(hash);
    const { numbers } = table;
    const mask = numbers.length - 1;
    let gap = hash & mask;
    while (numbers[gap] !== number) gap = (gap + 1) & mask;
    for (let at = (gap + 1) & mask; ; at = (at + 1) & mask) {
      const moved = numbers[at] ?? 0;
      if (moved === 0) break;
      if (((at - this.hashOf(moved)) & mask) < ((at - gap) & mask)) continue;
      numbers[gap] = moved;
      gap = at;
    }
    numbers[gap] = 0;
    table.size -= 1;
  }

  #tableOf(hash: number): Table {
    return this.#tables[hash >>> 24] as Table;
  }

  #insert(number: number, hash: number): void {
    let free = this.first(hash);
    while (free !== 0) free = this.next();
    this.#numbers[this.#at] = number;
  }
}

/** Every bit of the result depends on every bit of the value. */
export function mixed(value: number): number {
  let mixing = Math.imul(value ^ (value >>> 16), 0x85ebca6b);
  mixing = Math.imul(mixing ^ (mixing >>> 13), 0xc2b2ae35);
  return (mixing ^ (mixing >>> 16)) >>> 0;
}

export function larger(column: Uint32Array, rows: number): Uint32Array<ArrayBuffer> {
  const grown = new Uint32Array(rows);
  grown.set(column);
  return grown;
}
