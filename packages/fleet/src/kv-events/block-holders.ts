import type { Instance } from "../instances/instance.js";
import { placeHash } from "./block-table.js";

/** Sizes of blocks that are followed. Others are not found by a prompt. */
const MAX_GEOMETRIES = 8;
/** Every fourth block of a prompt is recorded, and its first one. The indexes of the instances know all blocks. */
const SAMPLED = 4;
/** Up to this number the holders of a block are a list, above it a set. */
const MOST_LISTED = 16;
const FIRST_CAPACITY = 1024;
const MAX_LOAD_FACTOR = 0.75;
/** Marks the number of a group of holders, where others are numbers of an instance. */
const GROUP = 0x80000000;

/** How prompts are cut into blocks: their tokens, and the tokens after them that their hashes cover too. */
export interface BlockGeometry {
  readonly blockSize: number;
  readonly lookahead: number;
}

interface KnownGeometry extends BlockGeometry {
  /** The chain of a prompt before its first block. */
  readonly chain: number;
  /** Instances that have it. */
  instances: number;
}

type Group = Instance[] | Set<Instance>;

/** Instances that may have the first blocks of a prompt in their prefix cache. */
export interface PromptHolders {
  readonly instances: ReadonlySet<Instance>;
  /** Tokens of the prompt that each of them has at least; undefined if an engine may have a block without the blocks before it. */
  readonly tokens: number | undefined;
}

/**
 * Which instances have a block of a prompt, of all instances in one table: a router would ask the index of each otherwise. A block is known by a hash of its
 * own tokens and all before them (its chain). Both are of 32 bits, and one block in four is recorded, so an instance found here is asked for what it has.
 */
export class BlockHolders {
  readonly #geometries = new Map<string, KnownGeometry>();
  // An open table: a chain, and the number of its only holder, or of its group of holders.
  #chains = new Uint32Array(FIRST_CAPACITY);
  #holders = new Uint32Array(FIRST_CAPACITY);
  #size = 0;
  readonly #numbers = new Map<Instance, number>();
  readonly #instances: (Instance | undefined)[] = [undefined];
  readonly #groups: (Group | undefined)[] = [];
  readonly #freeGroups: number[] = [];
  /** Instances with several KV cache groups, or with a window: their blocks alone do not say what a prompt finds. */
  readonly #withGroups = new Set<Instance>();

  /** Blocks that are recorded. */
  get size(): number {
    return this.#size;
  }

  /** Of prompts of this geometry, the chain before the first block; 0 where there are too many geometries. An instance begins to use it. */
  open({ blockSize, lookahead }: BlockGeometry): number {
    const key = `${blockSize} ${lookahead}`;
    let known = this.#geometries.get(key);
    if (known === undefined) {
      if (this.#geometries.size >= MAX_GEOMETRIES) return 0;
      known = { blockSize, lookahead, chain: chainOf(blockSize, lookahead), instances: 0 };
      this.#geometries.set(key, known);
    }
    known.instances += 1;
    return known.chain;
  }

  /** An instance ends to use a geometry. */
  closed({ blockSize, lookahead }: BlockGeometry): void {
    const key = `${blockSize} ${lookahead}`;
    const known = this.#geometries.get(key);
    if (known === undefined) return;
    known.instances -= 1;
    if (known.instances === 0) this.#geometries.delete(key);
  }

  /** Records that an instance has a block. */
  add(chain: number, instance: Instance): void {
    const entry = this.#find(chain);
    if (this.#chains[entry] === 0) {
      this.#chains[entry] = chain;
      this.#holders[entry] = this.#numberOf(instance);
      this.#size += 1;
      if (this.#size > this.#chains.length * MAX_LOAD_FACTOR) this.#grow();
      return;
    }
    const holder = this.#holders[entry] ?? 0;
    if (holder < GROUP) {
      const first = this.#instances[holder];
      if (first === instance) return;
      if (first === undefined) {
        this.#holders[entry] = this.#numberOf(instance);
        return;
      }
      const group = this.#freeGroups.pop() ?? this.#groups.length;
      this.#groups[group] = [first, instance];
      this.#holders[entry] = GROUP + group;
      return;
    }
    const at = holder - GROUP;
    const group = this.#groups[at];
    if (group instanceof Set) group.add(instance);
    else if (group !== undefined && !group.includes(instance)) {
      if (group.length < MOST_LISTED) group.push(instance);
      else this.#groups[at] = new Set([...group, instance]);
    }
  }

  /** An instance no longer has a block. */
  remove(chain: number, instance: Instance): void {
    const entry = this.#find(chain);
    if (this.#chains[entry] === 0) return;
    const holder = this.#holders[entry] ?? 0;
    if (holder < GROUP) {
      if (this.#instances[holder] === instance) this.#delete(entry);
      return;
    }
    const group = this.#groups[holder - GROUP];
    if (group instanceof Set) group.delete(instance);
    else if (group?.includes(instance) === true) group.splice(group.indexOf(instance), 1);
    const [left, ...others] = group === undefined || sizeOf(group) > 1 ? [] : group;
    if (left === undefined || others.length > 0) return;
    this.#holders[entry] = this.#numberOf(left);
    this.#groups[holder - GROUP] = undefined;
    this.#freeGroups.push(holder - GROUP);
  }

  /** An instance has several KV cache groups, or one with a window. */
  hasGroups(instance: Instance): void {
    this.#withGroups.add(instance);
  }

  /** Forgets an instance, of which no block is recorded any more. */
  forget(instance: Instance): void {
    this.#withGroups.delete(instance);
    const number = this.#numbers.get(instance);
    if (number === undefined) return;
    this.#numbers.delete(instance);
    this.#instances[number] = undefined;
  }

  /** Whether a block is one of those that are recorded. */
  static isRecorded(chain: number, isFirst: boolean): boolean {
    return chain !== 0 && (isFirst || chain % SAMPLED === 0);
  }

  /**
   * The instances that may have a begin of a prompt, the longest begin first. `keyAt`: the hash of the tokens of a block of the prompt; undefined behind the
   * last.
   */
  longestFirst(keysOf: (geometry: BlockGeometry) => (block: number) => number | undefined): PromptHolders[] {
    const isExact = this.#withGroups.size === 0;
    const found: { readonly tokens: number; readonly holders: Group }[] = [];
    for (const geometry of this.#geometries.values()) {
      const keyAt = keysOf(geometry);
      let { chain } = geometry;
      let before: Group | undefined;
      for (let block = 0; ; block += 1) {
        const key = keyAt(block);
        if (key === undefined) break;
        chain = chainOf(chain, key);
        if (!BlockHolders.isRecorded(chain, block === 0)) continue;
        const all = this.#holdersOf(chain);
        if (all === undefined) break;
        // An instance may have removed a block and kept later ones. They are of no use to it, unless it has a window.
        const holders = before === undefined || !isExact ? all : within(all, before);
        if (sizeOf(holders) === 0) break;
        // The same as those of the shorter begin.
        if (isExact && !(holders instanceof Set) && sizeOf(holders) === sizeOf(before ?? [])) found.pop();
        before = holders;
        found.push({ tokens: (block + 1) * geometry.blockSize, holders });
      }
    }
    if (this.#geometries.size > 1) found.sort((one, other) => one.tokens - other.tokens);
    return found.reverse().map(({ tokens, holders }) => ({
      instances: holders instanceof Set ? holders : new Set(holders),
      tokens: isExact ? tokens : undefined,
    }));
  }

  #holdersOf(chain: number): Group | undefined {
    const entry = this.#find(chain);
    if (this.#chains[entry] === 0) return undefined;
    const holder = this.#holders[entry] ?? 0;
    if (holder >= GROUP) return this.#groups[holder - GROUP];
    const instance = this.#instances[holder];
    return instance === undefined ? undefined : [instance];
  }

  /** The entry of a chain, or the free one where it belongs. */
  #find(chain: number): number {
    const mask = this.#chains.length - 1;
    let entry = placeOf(chain) & mask;
    while (this.#chains[entry] !== 0 && this.#chains[entry] !== chain) entry = (entry + 1) & mask;
    return entry;
  }

  /** Entries behind it move up where they would not be found otherwise. */
  #delete(deleted: number): void {
    const mask = this.#chains.length - 1;
    let gap = deleted;
    for (let entry = (gap + 1) & mask; this.#chains[entry] !== 0; entry = (entry + 1) & mask) {
      const chain = this.#chains[entry] ?? 0;
      if (((entry - placeOf(chain)) & mask) < ((entry - gap) & mask)) continue;
      this.#chains[gap] = chain;
      this.#holders[gap] = this.#holders[entry] ?? 0;
      gap = entry;
    }
    this.#chains[gap] = 0;
    this.#size -= 1;
  }

  #grow(): void {
    const [chains, holders] = [this.#chains, this.#holders];
    this.#chains = new Uint32Array(2 * chains.length);
    this.#holders = new Uint32Array(2 * chains.length);
    for (const [at, chain] of chains.entries()) {
      if (chain === 0) continue;
      const entry = this.#find(chain);
      this.#chains[entry] = chain;
      this.#holders[entry] = holders[at] ?? 0;
    }
  }

  #numberOf(instance: Instance): number {
    let number = this.#numbers.get(instance);
    if (number === undefined) {
      number = this.#instances.length;
      this.#instances.push(instance);
      this.#numbers.set(instance, number);
    }
    return number;
  }
}

/** The chain of a block: of the block before it, and a hash of its own tokens. Never 0. */
export function chainOf(before: number, tokens: number): number {
  return placeHash(before, tokens) || 1;
}

/** Recorded chains are mostly multiples of `SAMPLED`. */
function placeOf(chain: number): number {
  return (chain >>> 2) ^ (chain << 30);
}

/** The instances of `group` that are in `other` as well. Two sets are too large to be compared: then all of `group`. */
function within(group: Group, other: Group): Group {
  if (group instanceof Set)
    return other instanceof Set ? group : other.filter((instance) => group.has(instance));
  const has = (instance: Instance) => (other instanceof Set ? other.has(instance) : other.includes(instance));
  return group.filter(has);
}

function sizeOf(holders: Group): number {
  return holders instanceof Set ? holders.size : holders.length;
}
