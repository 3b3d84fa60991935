const FIRST_LENGTH = 2048;
/** At most this share of the entries is in use. */
const MAX_LOAD_FACTOR = 0.75;

/**
 * Numbers above 0, found by the hash of what each stands for: an open table in a typed array, of 5 to 11 bytes for a number. A `Map` would take several
 * times as much, and a router follows many engines with millions of blocks.
 */
export class HashTable {
  #numbers = new Uint32Array(FIRST_LENGTH);
  #size = 0;
  /** The entry that was looked at last. */
  #at = 0;
  readonly #hashOf: (number: number) => number;

  /** `hashOf`: the hash of a number's value, of 32 bits. */
  constructor(hashOf: (number: number) => number) {
    this.#hashOf = hashOf;
  }

  /** The first number whose value may have this hash; 0 where there is none. */
  first(hash: number): number {
    this.#at = hash & (this.#numbers.length - 1);
    return this.#numbers[this.#at] ?? 0;
  }

  /** The number after the last that `first` or `next` has returned; 0 behind the last. */
  next(): number {
    this.#at = (this.#at + 1) & (this.#numbers.length - 1);
    return this.#numbers[this.#at] ?? 0;
  }

  /** Adds a number. */
  add(number: number): void {
    this.#size += 1;
    if (this.#size > this.#numbers.length * MAX_LOAD_FACTOR) {
      const numbers = this.#numbers;
      this.#numbers = new Uint32Array(2 * numbers.length);
      for (const known of numbers) if (known !== 0) this.#insert(known);
    }
    this.#insert(number);
  }

  /** Removes a number. Those behind it move up where they would not be found otherwise. */
  remove(number: number): void {
    const numbers = this.#numbers;
    const mask = numbers.length - 1;
    let gap = this.#hashOf(number) & mask;
    while (numbers[gap] !== number) gap = (gap + 1) & mask;
    for (let at = (gap + 1) & mask; ; at = (at + 1) & mask) {
      const moved = numbers[at] ?? 0;
      if (moved === 0) break;
      if (((at - this.#hashOf(moved)) & mask) < ((at - gap) & mask)) continue;
      numbers[gap] = moved;
      gap = at;
    }
    numbers[gap] = 0;
    this.#size -= 1;
  }

  #insert(number: number): void {
    let free = this.first(this.#hashOf(number));
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

/** A column with more rows. */
export function larger(column: Uint32Array, rows: number): Uint32Array<ArrayBuffer> {
  const grown = new Uint32Array(rows);
  grown.set(column);
  return grown;
}
