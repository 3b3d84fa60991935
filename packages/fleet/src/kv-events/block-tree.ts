import type { Instance } from "../instances/instance.js";
import { getOrAdd } from "../instances/pooled-instance.js";
import { HashTable, larger, mixed } from "./hash-table.js";

/** Prompts find no blocks of further ones. */
const MAX_GEOMETRIES = 8;
/** Above this number, holders are a bit set. */
const MOST_LISTED = 16;
const FIRST_ROWS = 1024;
const SEVERAL = 0x80000000;

/** How prompts are cut: the tokens of a block, and those after it that its hash covers. */
export interface BlockGeometry {
  readonly blockSize: number;
  readonly lookahead: number;
}

export interface KnownGeometry extends BlockGeometry {
  readonly root: number;
  /** Holders with blocks of it. */
  readonly users: Set<number>;
}

type Several = readonly number[] | BitSet;

export interface Holders extends Iterable<Instance> {
  readonly size: number;
  has(instance: Instance): boolean;
}

export interface PromptHolders {
  readonly instances: Holders;
  /** Length of the prompt up to the last block that all have. Earlier blocks may be missing. */
  readonly tokens: number;
}

/**
 * The prompt blocks in any instance's prefix cache, with their holders. A parent and a 32-bit hash
 * of tokens identify a block; a wrong match costs a request only its best instance.
 */
export class BlockTree {
  // Indexed by the number of a block.
  #parents = new Uint32Array(FIRST_ROWS);
  #tokens = new Uint32Array(FIRST_ROWS);
  #children = new Uint32Array(FIRST_ROWS);
  /** 0, the only holder, or `SEVERAL` plus the number of a list or set. */
  #holders = new Uint32Array(FIRST_ROWS);
  readonly #places = new HashTable((block) =>
    placeHash(this.#parents[block] ?? 0, this.#tokens[block] ?? 0),
  );
  size = 0;
  #next = 1;
  readonly #freeBlocks: number[] = [];
  readonly #instances: (Instance | undefined)[] = [undefined];
  readonly #numbers = new Map<Instance, number>();
  readonly #freeNumbers: number[] = [];
  readonly #several: (Several | undefined)[] = [];
  readonly #freeSeveral: number[] = [];
  readonly #geometries = new Set<KnownGeometry>();
  /** A router looks one prompt up for many instances. Valid until a block comes or goes. */
  #lastPath:
    | { readonly tokens: ArrayLike<number>; readonly of: KnownGeometry; readonly blocks: number[] }
    | undefined;

  geometry({ blockSize, lookahead }: BlockGeometry): KnownGeometry | undefined {
    for (const one of this.#geometries)
      if (one.blockSize === blockSize && one.lookahead === lookahead) return one;
    return undefined;
  }

  /** Undefined above the limit. */
  open(of: BlockGeometry, holder: number): KnownGeometry | undefined {
    let known = this.geometry(of);
    if (known === undefined && this.#geometries.size < MAX_GEOMETRIES) {
      known = { ...of, root: this.#newBlock(0, 0), users: new Set() };
      this.#geometries.add(known);
    }
    known?.users.add(holder);
    return known;
  }

  at(parent: number, tokens: number): number {
    let block = this.#places.first(placeHash(parent, tokens));
    while (block !== 0 && (this.#parents[block] !== parent || this.#tokens[block] !== tokens))
      block = this.#places.next();
    return block;
  }

  /** The caller must give the block a holder. */
  add(parent: number, tokens: number): number {
    const block = this.#newBlock(parent, tokens);
    this.#children[parent] = (this.#children[parent] ?? 0) + 1;
    this.#places.add(block);
    this.size += 1;
    this.#lastPath = undefined;
    return block;
  }

  hold(block: number, holder: number): void {
    const known = this.#holders[block] ?? 0;
    if (known === 0) this.#holders[block] = holder;
    if (known === 0 || known === holder) return;
    if (known < SEVERAL) {
      const several = this.#freeSeveral.pop() ?? this.#several.length;
      this.#several[several] = [known, holder];
      this.#holders[block] = SEVERAL + several;
      return;
    }
    const at = known - SEVERAL;
    const several = this.#several[at];
    if (several instanceof BitSet) several.add(holder);
    else if (several?.includes(holder) === false) {
      // A growing array would reserve room for many more.
      const all = [...several, holder];
      this.#several[at] = all.length <= MOST_LISTED ? all : new BitSet(all);
    }
  }

  drop(block: number, holder: number): void {
    const known = this.#holders[block] ?? 0;
    if (known >= SEVERAL) {
      const at = known - SEVERAL;
      let several = this.#several[at] ?? [];
      if (several instanceof BitSet) several.delete(holder);
      else {
        several = several.filter((other) => other !== holder);
        this.#several[at] = several;
      }
      if (sizeOf(several) > 1) return;
      const [left = 0] = several instanceof BitSet ? several.numbers() : several;
      this.#holders[block] = left;
      this.#several[at] = undefined;
      this.#freeSeveral.push(at);
      return;
    }
    if (known !== holder) return;
    this.#holders[block] = 0;
    let gone = block;
    while (this.#parents[gone] !== 0 && this.#children[gone] === 0 && this.#holders[gone] === 0) {
      const parent = this.#parents[gone] ?? 0;
      this.#places.remove(gone);
      this.#freeBlocks.push(gone);
      this.size -= 1;
      this.#lastPath = undefined;
      this.#children[parent] = (this.#children[parent] ?? 0) - 1;
      gone = parent;
    }
  }

  has(block: number, holder: number): boolean {
    const known = this.#holders[block] ?? 0;
    if (known < SEVERAL) return known === holder;
    const several = this.#several[known - SEVERAL];
    return several instanceof BitSet ? several.has(holder) : several?.includes(holder) === true;
  }

  holderOf(instance: Instance): number {
    return getOrAdd(this.#numbers, instance, () => {
      const number = this.#freeNumbers.pop() ?? this.#instances.length;
      this.#instances[number] = instance;
      return number;
    });
  }

  /**
   * Hides all blocks of the instance behind a new number. The caller drops the old number's blocks,
   * then calls `released`.
   */
  renewed(instance: Instance): number {
    this.#hide(instance);
    return this.holderOf(instance);
  }

  released(holder: number): void {
    this.#freeNumbers.push(holder);
    for (const geometry of this.#geometries) {
      geometry.users.delete(holder);
      if (geometry.users.size > 0) continue;
      this.#geometries.delete(geometry);
      this.#freeBlocks.push(geometry.root);
    }
  }

  forget(instance: Instance): void {
    const number = this.#hide(instance);
    if (number !== undefined) this.#freeNumbers.push(number);
  }

  #hide(instance: Instance): number | undefined {
    const number = this.#numbers.get(instance);
    this.#numbers.delete(instance);
    if (number !== undefined) this.#instances[number] = undefined;
    return number;
  }

  /** Without the last token, which is always computed. */
  path(tokens: ArrayLike<number>, of: KnownGeometry): readonly number[] {
    const last = this.#lastPath;
    if (last?.tokens === tokens && last.of === of) return last.blocks;
    const { blockSize, lookahead } = of;
    const blocks: number[] = [];
    let parent = of.root;
    for (let at = 0; at + blockSize < tokens.length; at += blockSize) {
      const to = at + blockSize + lookahead;
      if (to > tokens.length) break;
      parent = this.at(parent, tokensHash(tokens, at, to));
      if (parent === 0) break;
      blocks.push(parent);
    }
    this.#lastPath = { tokens, of, blocks };
    return blocks;
  }

  holders(tokens: ArrayLike<number>): PromptHolders[] {
    const found: { readonly tokens: number; readonly holders: Several }[] = [];
    for (const geometry of this.#geometries) {
      let longer: Several = [];
      const blocks = this.path(tokens, geometry);
      for (let at = blocks.length; at > 0; at -= 1) {
        const holders = this.#holdersOf(blocks[at - 1] ?? 0);
        if (areSame(holders, longer)) continue;
        longer = holders;
        found.push({ tokens: at * geometry.blockSize, holders });
      }
    }
    if (this.#geometries.size > 1) found.sort((one, other) => other.tokens - one.tokens);
    return found.map(({ tokens: length, holders }) => ({
      instances: this.#instancesOf(holders),
      tokens: length,
    }));
  }

  #holdersOf(block: number): Several {
    const holder = this.#holders[block] ?? 0;
    return holder >= SEVERAL ? (this.#several[holder - SEVERAL] ?? []) : [holder];
  }

  #instancesOf(holders: Several): Holders {
    if (!(holders instanceof BitSet)) return new Set(this.#listed(holders));
    return {
      size: holders.size,
      has: (instance) => holders.has(this.#numbers.get(instance) ?? 0),
      [Symbol.iterator]: () => this.#listed(holders.numbers())[Symbol.iterator](),
    };
  }

  #listed(holders: readonly number[]): Instance[] {
    const instances: Instance[] = [];
    for (const holder of holders) {
      const instance = this.#instances[holder];
      if (instance !== undefined) instances.push(instance);
    }
    return instances;
  }

  #newBlock(parent: number, tokens: number): number {
    const block = this.#freeBlocks.pop() ?? this.#next++;
    if (block === this.#parents.length) this.#grow(Math.ceil(block * 1.5));
    this.#parents[block] = parent;
    this.#tokens[block] = tokens;
    this.#children[block] = 0;
    this.#holders[block] = 0;
    return block;
  }

  #grow(rows: number): void {
    this.#parents = larger(this.#parents, rows);
    this.#tokens = larger(this.#tokens, rows);
    this.#children = larger(this.#children, rows);
    this.#holders = larger(this.#holders, rows);
  }
}

class BitSet {
  size = 0;
  #words: Uint32Array;

  constructor(numbers: readonly number[]) {
    this.#words = new Uint32Array((Math.max(...numbers) >>> 5) + 1);
    for (const number of numbers) this.add(number);
  }

  has(number: number): boolean {
    return ((this.#words[number >>> 5] ?? 0) & (1 << (number & 31))) !== 0;
  }

  add(number: number): void {
    if (this.has(number)) return;
    const word = number >>> 5;
    if (word >= this.#words.length) this.#words = larger(this.#words, word + 1);
    this.#words[word] = (this.#words[word] ?? 0) | (1 << (number & 31));
    this.size += 1;
  }

  delete(number: number): void {
    if (!this.has(number)) return;
    const word = number >>> 5;
    this.#words[word] = (this.#words[word] ?? 0) & ~(1 << (number & 31));
    this.size -= 1;
  }

  numbers(): number[] {
    const numbers: number[] = [];
    for (const [at, word] of this.#words.entries())
      for (let bits = word; bits !== 0; bits &= bits - 1)
        numbers.push(32 * at + 31 - Math.clz32(bits & -bits));
    return numbers;
  }
}

function sizeOf(holders: Several): number {
  return holders instanceof BitSet ? holders.size : holders.length;
}

/** Large sets of one size count as the same: instances mostly have the blocks before one too. */
function areSame(holders: Several, others: Several): boolean {
  if (sizeOf(holders) !== sizeOf(others)) return false;
  if (holders instanceof BitSet || others instanceof BitSet) return true;
  for (let at = 0; at < holders.length; at += 1) {
    const holder = holders[at] ?? 0;
    if (others[at] !== holder && !others.includes(holder)) return false;
  }
  return true;
}

/** FNV-1a over 32 bits of each token, and of covered tokens after them. */
export function tokensHash(
  tokens: ArrayLike<number>,
  from: number,
  to: number,
  after: ArrayLike<number> = [],
): number {
  return mixed(withTokens(withTokens(0x811c9dc5, tokens, from, to), after, 0, after.length));
}

function withTokens(before: number, tokens: ArrayLike<number>, from: number, to: number): number {
  let hash = before;
  for (let at = from; at < to; at += 1) {
    const token = tokens[at] ?? 0;
    hash = Math.imul(hash ^ (token & 0xffff), 0x01000193);
    hash = Math.imul(hash ^ (token >>> 16), 0x01000193);
  }
  return hash;
}

/**
 * Random per process, so that publishers cannot choose tokens that share an entry and slow
 * look-ups.
 */
const [SEED = 0] = crypto.getRandomValues(new Uint32Array(1));

export function placeHash(parent: number, tokens: number): number {
  // Mixed alone, since tokens could be chosen to cancel a known parent.
  return mixed(mixed(parent ^ SEED) ^ tokens);
}
