/** Entries of a segment. */
const SEGMENT_LENGTH = 2048;
/** At most this share of a segment's entries is in use. */
const MAX_LOAD_FACTOR = 0.75;
/** Segments whose hashes have so many bits in common are not split any more, and grow. */
const MAX_DEPTH = 20;

/**
 * Numbers whose hashes begin with the same bits: an open table, in which the last bits of a hash
 * say where the search begins.
 */
interface Segment {
  readonly numbers: Uint32Array;
  readonly depth: number;
  size: number;
}

/**
 * Numbers above 0, found by the hash of what each stands for: open tables in typed arrays, of 5 to
 * 11 bytes for a number. A `Map` would take several times as much, and a router follows many
 * engines with millions of blocks. A segment that is full is split in two, so that no addition
 * takes longer in a large table.
 */
export class HashTable {
  /** By the first bits of a hash. A segment may be there several times. */
  #segments: Segment[] = [newSegment(0)];
  #depth = 0;
  #segment: Segment = this.#segments[0] as Segment;
  #at = 0;
  readonly #hashOf: (number: number) => number;

  /** `hashOf`: the hash of a number's value, of 32 bits. */
  constructor(hashOf: (number: number) => number) {
    this.#hashOf = hashOf;
  }

  /** The first number whose value may have this hash; 0 where there is none. */
  first(hash: number): number {
    this.#segment = this.#segmentOf(hash);
    const { numbers } = this.#segment;
    this.#at = hash & (numbers.length - 1);
    return numbers[this.#at] ?? 0;
  }

  /** The number after the last that `first` or `next` has returned; 0 behind the last. */
  next(): number {
    const { numbers } = this.#segment;
    this.#at = (this.#at + 1) & (numbers.length - 1);
    return numbers[this.#at] ?? 0;
  }

  add(number: number): void {
    const hash = this.#hashOf(number);
    for (;;) {
      const segment = this.#segmentOf(hash);
      if (segment.size < segment.numbers.length * MAX_LOAD_FACTOR) break;
      this.#split(segment, hash);
    }
    this.#insert(number, hash);
  }

  /** Removes a number. Those behind it move up where they would not be found otherwise. */
  remove(number: number): void {
    const hash = this.#hashOf(number);
    const segment = this.#segmentOf(hash);
    const { numbers } = segment;
    const mask = numbers.length - 1;
    let gap = hash & mask;
    while (numbers[gap] !== number) gap = (gap + 1) & mask;
    for (let at = (gap + 1) & mask; ; at = (at + 1) & mask) {
      const moved = numbers[at] ?? 0;
      if (moved === 0) break;
      if (((at - this.#hashOf(moved)) & mask) < ((at - gap) & mask)) continue;
      numbers[gap] = moved;
      gap = at;
    }
    numbers[gap] = 0;
    segment.size -= 1;
  }

  #segmentOf(hash: number): Segment {
    return this.#segments[this.#depth === 0 ? 0 : hash >>> (32 - this.#depth)] as Segment;
  }

  #insert(number: number, hash = this.#hashOf(number)): void {
    let free = this.first(hash);
    while (free !== 0) free = this.next();
    this.#segment.numbers[this.#at] = number;
    this.#segment.size += 1;
  }

  #split({ numbers, depth }: Segment, hash: number): void {
    const isSplit = depth < MAX_DEPTH;
    if (isSplit && depth === this.#depth) {
      this.#segments = this.#segments.flatMap((segment) => [segment, segment]);
      this.#depth += 1;
    }
    const places = 2 ** (this.#depth - depth);
    const start = (hash >>> (32 - this.#depth)) & ~(places - 1);
    if (isSplit) {
      this.#segments.fill(newSegment(depth + 1), start, start + places / 2);
      this.#segments.fill(newSegment(depth + 1), start + places / 2, start + places);
    } else this.#segments.fill(newSegment(depth, 2 * numbers.length), start, start + places);
    for (const number of numbers) if (number !== 0) this.#insert(number);
  }
}

function newSegment(depth: number, length = SEGMENT_LENGTH): Segment {
  return { numbers: new Uint32Array(length), depth, size: 0 };
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
