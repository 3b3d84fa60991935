/** The parent of the first block of a prompt. It is no block: numbers of blocks begin at 1. */
export const ROOT = 0;
/** The parent of a block whose place is not known. */
const UNPLACED = 0xffffffff;
const FIRST_CAPACITY = 1024;
/** A table has at most this share of its entries in use. */
const MAX_LOAD_FACTOR = 0.75;
const MAX_COUNT = 255;

/**
 * Blocks by number in typed arrays, found by their hash and by their place: their parent and a hash of their tokens. An object for each block would take
 * several times the memory, and a router follows many engines with millions of blocks.
 *
 * Of a hash 64 bits are kept: among ten million blocks, two are taken for one with a chance of one in a hundred thousand.
 */
export class BlockTable {
  #capacity = FIRST_CAPACITY;
  // By number.
  #low = new Uint32Array(FIRST_CAPACITY);
  #high = new Uint32Array(FIRST_CAPACITY);
  /** Of a free number, the next free one. */
  #parent = new Uint32Array(FIRST_CAPACITY);
  #tokens = new Uint32Array(FIRST_CAPACITY);
  #children = new Uint32Array(FIRST_CAPACITY);
  /** See `chain`. */
  #chains = new Uint32Array(FIRST_CAPACITY);
  /** By group, how many copies it has of each block. */
  readonly #copies = new Map<number, Uint8Array>();
  // Numbers at places that hashes give, or at the next free ones; 0 where there is none.
  #byHash = new Uint32Array(2 * FIRST_CAPACITY);
  #byPlace = new Uint32Array(2 * FIRST_CAPACITY);
  #placed = 0;
  #size = 0;
  #next = 1;
  #firstFree = 0;

  /** How many blocks there are. */
  get size(): number {
    return this.#size;
  }

  /** The block with this hash; 0 where there is none. */
  find(hash: string): number {
    fingerprint(hash);
    return this.#find();
  }

  /** The block with this hash, which is added where there is none. */
  add(hash: string): number {
    fingerprint(hash);
    const known = this.#find();
    if (known !== 0) return known;
    const block = this.#newNumber();
    this.#low[block] = low;
    this.#high[block] = high;
    this.#parent[block] = UNPLACED;
    this.#chains[block] = 0;
    this.#size += 1;
    if (this.#size > this.#byHash.length * MAX_LOAD_FACTOR)
      this.#byHash = rehashed(this.#byHash, (one) => this.#hashEntry(one));
    insert(this.#byHash, this.#hashEntry(block), block);
    return block;
  }

  /** Removes a block that has neither children nor copies. */
  remove(block: number): void {
    remove(this.#byHash, this.#hashEntry(block), block, (one) => this.#hashEntry(one));
    if (this.#parent[block] !== UNPLACED) {
      remove(this.#byPlace, this.#placeEntry(block), block, (one) => this.#placeEntry(one));
      this.#placed -= 1;
    }
    this.#parent[block] = this.#firstFree;
    this.#chains[block] = 0;
    this.#firstFree = block;
    this.#size -= 1;
  }

  /** The block at a place; 0 where there is none. */
  at(parent: number, tokens: number): number {
    const mask = this.#byPlace.length - 1;
    for (let entry = placeHash(parent, tokens); ; entry += 1) {
      const block = this.#byPlace[entry & mask] ?? 0;
      if (block === 0 || (this.#parent[block] === parent && this.#tokens[block] === tokens)) return block;
    }
  }

  /** Gives a block its place. It has none yet, and the place is free. */
  place(block: number, parent: number, tokens: number): void {
    this.#parent[block] = parent;
    this.#tokens[block] = tokens;
    if (parent !== ROOT) this.#children[parent] = this.children(parent) + 1;
    this.#placed += 1;
    if (this.#placed > this.#byPlace.length * MAX_LOAD_FACTOR)
      this.#byPlace = rehashed(this.#byPlace, (one) => this.#placeEntry(one));
    insert(this.#byPlace, this.#placeEntry(block), block);
  }

  /** The block before it, or `ROOT`; undefined while its place is not known. */
  parentOf(block: number): number | undefined {
    const parent = this.#parent[block];
    return parent === UNPLACED ? undefined : parent;
  }

  /** Whether a block is at this place. */
  isAt(block: number, parent: number, tokens: number): boolean {
    return this.#parent[block] === parent && this.#tokens[block] === tokens;
  }

  /** A hash of the tokens of the block and of all before it; 0 while it is not known. */
  chain(block: number): number {
    return this.#chains[block] ?? 0;
  }

  /** Records the chain of a block. */
  setChain(block: number, chain: number): void {
    this.#chains[block] = chain;
  }

  /** The blocks that have a chain. */
  *chained(): Generator<number> {
    for (let block = 1; block < this.#next; block += 1) if (this.#chains[block] !== 0) yield block;
  }

  /** How many blocks have it as their parent. */
  children(block: number): number {
    return this.#children[block] ?? 0;
  }

  /** A child of the block was removed. */
  childRemoved(block: number): void {
    this.#children[block] = this.children(block) - 1;
  }

  /** How many copies of a block a group has. */
  copies(block: number, group: number): number {
    return this.#copies.get(group)?.[block] ?? 0;
  }

  /** Whether any group has a copy of a block. */
  hasCopies(block: number): boolean {
    for (const counts of this.#copies.values()) if ((counts[block] ?? 0) > 0) return true;
    return false;
  }

  /** Counts copies; above 255 they are not counted. */
  addCopies(block: number, group: number, by: 1 | 0 | -1): void {
    let counts = this.#copies.get(group);
    if (counts === undefined) {
      counts = new Uint8Array(this.#capacity);
      this.#copies.set(group, counts);
    }
    counts[block] = Math.min(MAX_COUNT, Math.max(0, (counts[block] ?? 0) + by));
  }

  #find(): number {
    const mask = this.#byHash.length - 1;
    for (let entry = low; ; entry += 1) {
      const block = this.#byHash[entry & mask] ?? 0;
      if (block === 0 || (this.#low[block] === low && this.#high[block] === high)) return block;
    }
  }

  #newNumber(): number {
    const free = this.#firstFree;
    if (free !== 0) {
      this.#firstFree = this.#parent[free] ?? 0;
      this.#children[free] = 0;
      return free;
    }
    if (this.#next === this.#capacity) this.#grow(Math.ceil(this.#capacity * 1.5));
    return this.#next++;
  }

  #grow(capacity: number): void {
    this.#capacity = capacity;
    this.#low = larger(this.#low, capacity);
    this.#high = larger(this.#high, capacity);
    this.#parent = larger(this.#parent, capacity);
    this.#tokens = larger(this.#tokens, capacity);
    this.#children = larger(this.#children, capacity);
    this.#chains = larger(this.#chains, capacity);
    for (const [group, counts] of this.#copies) {
      const grown = new Uint8Array(capacity);
      grown.set(counts);
      this.#copies.set(group, grown);
    }
  }

  #hashEntry(block: number): number {
    return this.#low[block] ?? 0;
  }

  #placeEntry(block: number): number {
    return placeHash(this.#parent[block] ?? 0, this.#tokens[block] ?? 0);
  }
}

function insert(table: Uint32Array, first: number, block: number): void {
  const mask = table.length - 1;
  let entry = first;
  while (table[entry & mask] !== 0) entry += 1;
  table[entry & mask] = block;
}

/** Takes a block out. Those behind it move up where they would not be found otherwise. */
function remove(
  table: Uint32Array,
  first: number,
  removed: number,
  firstOf: (block: number) => number,
): void {
  const mask = table.length - 1;
  let gap = first & mask;
  while (table[gap] !== removed) gap = (gap + 1) & mask;
  for (let entry = (gap + 1) & mask; ; entry = (entry + 1) & mask) {
    const block = table[entry] ?? 0;
    if (block === 0) break;
    const fromFirst = (entry - firstOf(block)) & mask;
    const fromGap = (entry - gap) & mask;
    if (fromFirst < fromGap) continue;
    table[gap] = block;
    gap = entry;
  }
  table[gap] = 0;
}

function rehashed(table: Uint32Array, firstOf: (block: number) => number): Uint32Array<ArrayBuffer> {
  const larger = new Uint32Array(2 * table.length);
  for (const block of table) if (block !== 0) insert(larger, firstOf(block), block);
  return larger;
}

function larger(column: Uint32Array, capacity: number): Uint32Array<ArrayBuffer> {
  const grown = new Uint32Array(capacity);
  grown.set(column);
  return grown;
}

let low = 0;
let high = 0;

/** Differ in each process, so that a publisher of events does not know which hashes and tokens fall on one entry and make each look-up long. */
const [SEED = 0, OTHER_SEED = 0] = crypto.getRandomValues(new Uint32Array(2));

/** Sets `low` and `high` to 64 bits of a hash's text. */
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

/** Every bit of the result depends on every bit of the value. */
export function mixed(value: number): number {
  let mixing = Math.imul(value ^ (value >>> 16), 0x85ebca6b);
  mixing = Math.imul(mixing ^ (mixing >>> 13), 0xc2b2ae35);
  return (mixing ^ (mixing >>> 16)) >>> 0;
}

/** Where the search for the block at a place begins. */
export function placeHash(parent: number, tokens: number): number {
  // The parent is mixed alone: numbers of blocks are known, so tokens that cancel its part could be chosen otherwise.
  return mixed(mixed(parent ^ SEED) ^ tokens);
}
