import type { Instance } from "../instances/instance.js";
import { HashTable, larger, mixed } from "./hash-table.js";

/** Sizes of blocks that are followed. Others are not found by a prompt. */
const MAX_GEOMETRIES = 8;
/** Up to this number the holders of a block are a list, above it a bit set. */
const MOST_LISTED = 16;
const FIRST_ROWS = 1024;
/** Marks the number of a list or set of holders, where others are numbers of a holder. */
const SEVERAL = 0x80000000;

/**
 * How prompts are cut into blocks: their tokens, and the tokens after them that their hashes cover
 * too.
 */
export interface BlockGeometry {
  readonly blockSize: number;
  readonly lookahead: number;
}

/** A geometry that instances use. */
export interface KnownGeometry extends BlockGeometry {
  /** The parent of the first block of each prompt. */
  readonly root: number;
}

type Several = readonly number[] | BitSet;

/** Instances that may hold something. */
export interface Holders extends Iterable<Instance> {
  readonly size: number;
  has(instance: Instance): boolean;
}

/** Instances that may have the first blocks of a prompt in their prefix cache. */
export interface PromptHolders {
  readonly instances: Holders;
  /**
   * Tokens of the prompt up to the last block that each of them has. An instance may have removed a
   * block and kept later ones.
   */
  readonly tokens: number;
}

/**
 * The blocks of prompts that any instance has in its prefix cache, each once, with the instances
 * that have it. A block is known by the block before it and a hash of its tokens, of 32 bits: a
 * wrong match costs a request its best instance.
 */
export class BlockTree {
  // By the number of a block.
  /** Of a free number, the next free one. */
  #parents = new Uint32Array(FIRST_ROWS);
  #tokens = new Uint32Array(FIRST_ROWS);
  #children = new Uint32Array(FIRST_ROWS);
  /** 0, the number of the only holder, or `SEVERAL` and the number of several. */
  #holders = new Uint32Array(FIRST_ROWS);
  readonly #places = new HashTable((block) =>
    placeHash(this.#parents[block] ?? 0, this.#tokens[block] ?? 0),
  );
  #size = 0;
  #next = 1;
  #firstFree = 0;
  readonly #instances: (Instance | undefined)[] = [undefined];
  readonly #numbers = new Map<Instance, number>();
  readonly #freeNumbers: number[] = [];
  readonly #several: (Several | undefined)[] = [];
  readonly #freeSeveral: number[] = [];
  readonly #geometries = new Map<string, KnownGeometry & { users: number }>();
  /**
   * A router looks a prompt up for one instance after another. Valid until a block comes or goes.
   */
  #lastPath:
    | { readonly tokens: ArrayLike<number>; readonly of: BlockGeometry; readonly blocks: number[] }
    | undefined;

  get size(): number {
    return this.#size;
  }

  /** An instance begins to use a geometry. Undefined where there are too many. */
  open({ blockSize, lookahead }: BlockGeometry): KnownGeometry | undefined {
    const key = `${blockSize} ${lookahead}`;
    let known = this.#geometries.get(key);
    if (known === undefined) {
      if (this.#geometries.size >= MAX_GEOMETRIES) return undefined;
      known = { blockSize, lookahead, root: this.#newBlock(0, 0), users: 0 };
      this.#geometries.set(key, known);
    }
    known.users += 1;
    return known;
  }

  /** An instance, which has no blocks any more, ends to use a geometry. */
  closed({ blockSize, lookahead }: BlockGeometry): void {
    const key = `${blockSize} ${lookahead}`;
    const known = this.#geometries.get(key);
    if (known === undefined) return;
    known.users -= 1;
    if (known.users > 0) return;
    this.#geometries.delete(key);
    this.#free(known.root);
  }

  /** The block at a place; 0 where there is none. */
  at(parent: number, tokens: number): number {
    let block = this.#places.first(placeHash(parent, tokens));
    while (block !== 0 && (this.#parents[block] !== parent || this.#tokens[block] !== tokens))
      block = this.#places.next();
    return block;
  }

  /** Adds the block at a place where there is none. An instance must hold it. */
  add(parent: number, tokens: number): number {
    const block = this.#newBlock(parent, tokens);
    this.#children[parent] = (this.#children[parent] ?? 0) + 1;
    this.#places.add(block);
    this.#size += 1;
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
      // An array that grows keeps room for many more.
      const all = [...several, holder];
      this.#several[at] = all.length <= MOST_LISTED ? all : new BitSet(all);
    }
  }

  /**
   * A holder no longer has a block. A block that nobody has is forgotten when it has no children.
   */
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
      this.#free(gone);
      this.#size -= 1;
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
    let number = this.#numbers.get(instance);
    if (number === undefined) {
      number = this.#freeNumbers.pop() ?? this.#instances.length;
      this.#instances[number] = instance;
      this.#numbers.set(instance, number);
    }
    return number;
  }

  /**
   * The instance has lost all blocks. Returns its new number; nobody is found by the old one from
   * now on. Whoever has the old one drops its blocks, which takes a while, and then calls
   * `released`.
   */
  renewed(instance: Instance): number {
    const number = this.#numbers.get(instance);
    if (number !== undefined) this.#instances[number] = undefined;
    this.#numbers.delete(instance);
    return this.holderOf(instance);
  }

  /** The blocks of a number that was renewed are dropped. */
  released(holder: number): void {
    this.#freeNumbers.push(holder);
  }

  forget(instance: Instance): void {
    const number = this.#numbers.get(instance);
    if (number === undefined) return;
    this.#numbers.delete(instance);
    this.#instances[number] = undefined;
    this.#freeNumbers.push(number);
  }

  /**
   * The blocks of a prompt that any instance has, from its first. The last token is not in them: it
   * is always computed.
   */
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

  /** The instances that may have a begin of a prompt, the longest begin first. */
  holders(tokens: ArrayLike<number>): PromptHolders[] {
    const found: { readonly tokens: number; readonly holders: Several }[] = [];
    for (const geometry of this.#geometries.values()) {
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
    let block = this.#firstFree;
    if (block === 0) {
      block = this.#next++;
      if (block === this.#parents.length) this.#grow(Math.ceil(block * 1.5));
    } else this.#firstFree = this.#parents[block] ?? 0;
    this.#parents[block] = parent;
    this.#tokens[block] = tokens;
    this.#children[block] = 0;
    this.#holders[block] = 0;
    return block;
  }

  #free(block: number): void {
    this.#parents[block] = this.#firstFree;
    this.#firstFree = block;
  }

  #grow(rows: number): void {
    this.#parents = larger(this.#parents, rows);
    this.#tokens = larger(this.#tokens, rows);
    this.#children = larger(this.#children, rows);
    this.#holders = larger(this.#holders, rows);
  }
}

/** A set of small numbers, of a bit for each. */
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

/**
 * Two large sets of one size are not compared: instances that have a block mostly have those before
 * it.
 */
function areSame(holders: Several, others: Several): boolean {
  if (sizeOf(holders) !== sizeOf(others)) return false;
  if (holders instanceof BitSet || others instanceof BitSet) return true;
  for (let at = 0; at < holders.length; at += 1) {
    const holder = holders[at] ?? 0;
    if (others[at] !== holder && !others.includes(holder)) return false;
  }
  return true;
}

/** A hash of tokens, and of those after them that are covered too (FNV-1a over 32 bits each). */
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
 * Differs in each process, so that a publisher of events does not know which tokens fall on one
 * entry and make each look-up long.
 */
const [SEED = 0] = crypto.getRandomValues(new Uint32Array(1));

/** Where the search for the block at a place begins. */
export function placeHash(parent: number, tokens: number): number {
  // The parent is mixed alone: numbers of blocks are known, so tokens that cancel its part could be
  // chosen otherwise.
  return mixed(mixed(parent ^ SEED) ^ tokens);
}
