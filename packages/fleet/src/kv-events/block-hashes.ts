import { getOrAdd } from "../instances/pooled-instance.js";
import { HashTable, larger, mixed } from "./hash-table.js";

const FIRST_ROWS = 1024;
const MAX_COUNT = 255;

/**
 * One instance's blocks by vLLM's hashes: the place of each in the tree, and its copies per KV
 * cache group. It keeps 64 bits of a hash: two of ten million blocks collide with a chance of 1 in
 * 100,000.
 */
export class BlockHashes {
  // Indexed by the number of a hash.
  #low = new Uint32Array(FIRST_ROWS);
  #high = new Uint32Array(FIRST_ROWS);
  /** The block in the tree, 0 without a place. */
  #blocks = new Uint32Array(FIRST_ROWS);
  readonly #copies = new Map<number, Uint8Array>();
  readonly #table = new HashTable((number) => this.#low[number] ?? 0);
  #byBlock: HashTable | undefined;
  size = 0;
  #next = 1;
  readonly #free: number[] = [];

  find(hash: string): number {
    fingerprint(hash);
    let number = this.#table.first(low);
    while (number !== 0 && (this.#low[number] !== low || this.#high[number] !== high))
      number = this.#table.next();
    return number;
  }

  /** Call it only after `find` missed the hash. */
  addNotFound(): number {
    const number = this.#free.pop() ?? this.#next++;
    if (number === this.#low.length) this.#grow(Math.ceil(number * 1.5));
    this.#low[number] = low;
    this.#high[number] = high;
    this.#blocks[number] = 0;
    this.#table.add(number);
    this.size += 1;
    return number;
  }

  remove(number: number): void {
    this.#table.remove(number);
    if (this.#blocks[number] !== 0) this.#byBlock?.remove(number);
    this.#blocks[number] = 0;
    this.#free.push(number);
    this.size -= 1;
  }

  /** 0 without a place. */
  block(number: number): number {
    return this.#blocks[number] ?? 0;
  }

  place(number: number, block: number): void {
    this.#blocks[number] = block;
    this.#byBlock?.add(number);
  }

  /** Yields the last one first. */
  *placed(): Generator<number> {
    for (let number = this.#next - 1; number > 0; number -= 1)
      if (this.#blocks[number] !== 0 && this.hasCopies(number)) yield number;
  }

  copies(number: number, group: number): number {
    return this.#copies.get(group)?.[number] ?? 0;
  }

  numberOf(block: number): number {
    if (this.#byBlock === undefined) {
      this.#byBlock = new HashTable((number) => mixed(this.block(number)));
      for (const number of this.placed()) this.#byBlock.add(number);
    }
    let number = this.#byBlock.first(mixed(block));
    while (number !== 0 && this.#blocks[number] !== block) number = this.#byBlock.next();
    return number;
  }

  hasCopies(number: number): boolean {
    for (const counts of this.#copies.values()) if ((counts[number] ?? 0) > 0) return true;
    return false;
  }

  addCopies(number: number, group: number, by: 1 | 0 | -1): void {
    const counts = getOrAdd(this.#copies, group, () => new Uint8Array(this.#low.length));
    counts[number] = Math.min(MAX_COUNT, Math.max(0, (counts[number] ?? 0) + by));
  }

  #grow(rows: number): void {
    this.#low = larger(this.#low, rows);
    this.#high = larger(this.#high, rows);
    this.#blocks = larger(this.#blocks, rows);
    for (const [group, counts] of this.#copies) {
      const grown = new Uint8Array(rows);
      grown.set(counts);
      this.#copies.set(group, grown);
    }
  }
}

let low = 0;
let high = 0;

/**
 * Random per process, so that publishers cannot choose hashes that share an entry and slow
 * look-ups.
 */
const [SEED = 0, OTHER_SEED = 0] = crypto.getRandomValues(new Uint32Array(2));

function fingerprint(hash: string): void {
  let a = 0x811c9dc5 ^ SEED;
  let b = 0x9e3779b9 ^ OTHER_SEED;
  for (let at = 0; at < hash.length; at += 1) {
    const character = hash.charCodeAt(at);
    a = Math.imul(a ^ character, 0x01000193);
    b = Math.imul((b << 5) ^ (b >>> 27) ^ character, 0x85ebca6b);
  }
  low = mixed(a ^ (b >>> 15));
  high = mixed(b ^ (a << 7));
}
