import type { CacheGroup } from "./kv-event-batch.js";

/** A run of blocks that an instance has stored in its prefix cache. */
export interface StoredBlocks {
  /** vLLM's hashes of the blocks, as text. */
  readonly hashes: readonly string[];
  /** Hash of the block before the first; undefined where the run begins a prompt. */
  readonly parent: string | undefined;
  /**
   * Token ids of all blocks, in order. Where they are more than the blocks have, blocks were left out (vLLM does so in groups with a sliding window), and
   * the hashes do not say which: the place of such a block is known from another group.
   */
  readonly tokens: readonly number[];
  /** Tokens in a block. */
  readonly blockSize: number;
  /** Of each block, the tokens after it that its hash covers too (vLLM 0.33 with speculative layers). Absent: none. */
  readonly lookahead?: readonly (readonly number[])[] | undefined;
  /** The KV cache group. */
  readonly group: CacheGroup;
}

/** Blocks that were evicted. */
export interface RemovedBlocks {
  readonly hashes: readonly string[];
  /** Index of the KV cache group. */
  readonly group: number;
}

interface Block {
  /** Its number as a parent. */
  readonly id: number;
  readonly hash: string;
  /** The block before it, and its key in `#places`; undefined while its place is not known. */
  place: { readonly parent: Block | undefined; readonly key: number } | undefined;
  /** How many blocks have it as their parent. A block with children is kept when it is evicted: its number is theirs. */
  children: number;
  /** How many copies of it each group has: vLLM announces each copy that two requests have computed at once, and the end of each. */
  readonly copies: number[];
}

/** What is known of a group: the size of its blocks, and which blocks before a position it needs. */
interface Group extends CacheGroup {
  readonly blockSize: number;
}

const ROOT = 0;
/** Numbers of blocks have 21 bits and hashes of tokens 32, which makes 53 bits together. */
const MAX_ID = 2 ** 21;
const MAX_GROUPS = 32;

/**
 * The prefix cache of one instance as its KV events describe it: a tree of blocks, placed by the hash of their parent and by their tokens. The hashes are
 * taken from the events and not computed here; that of tokens is this class's own, of 32 bits: a wrong match costs a request its best instance.
 */
export class BlockIndex {
  readonly #maxBlocks: number;
  readonly #blocks = new Map<string, Block>();
  /** From a parent's number and a hash of a block's tokens to the block. */
  readonly #places = new Map<number, Block>();
  readonly #groups = new Map<number, Group>();
  readonly #freeIds: number[] = [];
  #nextId = ROOT + 1;
  #refused = 0;
  #contradictions = 0;
  /** Tokens after a block that its hash covers too. */
  #lookahead = 0;

  /** Blocks above `maxBlocks` are not recorded. */
  constructor(maxBlocks = 500_000) {
    this.#maxBlocks = Math.min(maxBlocks, MAX_ID - 1);
  }

  /** How many blocks are recorded. */
  get size(): number {
    return this.#blocks.size;
  }

  /** Blocks that were not recorded because there were too many. */
  get refused(): number {
    return this.#refused;
  }

  /** Blocks that an event has put at another place than an event before: no true publisher does so. */
  get contradictions(): number {
    return this.#contradictions;
  }

  /** Records blocks that were stored. */
  stored({ hashes, parent, tokens, blockSize, lookahead, group }: StoredBlocks): void {
    const isWhole = tokens.length === hashes.length * blockSize;
    if (!this.#learn(group, blockSize, isWhole)) return;
    const count = parent === undefined && this.#has(hashes, group.index) ? 0 : 1;
    // A parent that is not recorded, because its event was missed, may be recorded later.
    const first = parent === undefined || !isWhole ? undefined : this.#add(parent);
    if (parent !== undefined && isWhole && first === undefined) return;
    let before = first;
    for (const [at, hash] of hashes.entries()) {
      const block = this.#add(hash);
      if (block === undefined) break;
      block.copies[group.index] = (block.copies[group.index] ?? 0) + count;
      if (isWhole) {
        const own = tokens.slice(at * blockSize, (at + 1) * blockSize).concat(lookahead?.[at] ?? []);
        this.#lookahead = own.length - blockSize;
        this.#place(block, before, keyOf(before?.id ?? ROOT, own, 0, own.length));
      }
      before = block;
    }
    if (first !== undefined) this.#release(first);
  }

  /** Removes a copy of blocks that were evicted. */
  removed({ hashes, group }: RemovedBlocks): void {
    for (const hash of hashes) {
      const block = this.#blocks.get(hash);
      if (block === undefined) continue;
      const copies = block.copies[group] ?? 0;
      if (copies > 0) block.copies[group] = copies - 1;
      this.#release(block);
    }
  }

  /** Removes all blocks. */
  cleared(): void {
    this.#blocks.clear();
    this.#places.clear();
    this.#groups.clear();
    this.#freeIds.length = 0;
    this.#nextId = ROOT + 1;
    this.#refused = 0;
  }

  /**
   * How many tokens of a prompt, from its first, vLLM takes from its cache: the longest begin of which each KV cache group has the blocks that it needs. At
   * least the last token is computed.
   */
  matchedTokens(tokens: ArrayLike<number>): number {
    const groups = [...this.#groups.values()];
    const [first] = groups;
    // Most models have one group, and it needs all blocks.
    if (groups.length === 1 && first?.needs === "all") return this.#matchedOf(first, tokens);
    const sizes = [...new Set(groups.map(({ blockSize }) => blockSize))];
    const chains = new Map(sizes.map((size) => [size, this.#chain(tokens, size)]));
    const step = Math.max(1, ...sizes);
    // What all groups with full attention have.
    let matched = Number.POSITIVE_INFINITY;
    for (const { index, blockSize, needs } of groups) {
      const chain = chains.get(blockSize) ?? [];
      let length = needs === "all" ? 0 : chain.length;
      if (needs === "all") while ((chain[length]?.copies[index] ?? 0) > 0) length += 1;
      matched = Math.min(matched, length * blockSize);
    }
    if (!Number.isFinite(matched)) return 0;
    for (matched -= matched % step; matched > 0; matched -= step) {
      const end = matched;
      const isCached = groups.every(({ index, blockSize, needs }) => {
        if (needs === "all") return true;
        const chain = chains.get(blockSize) ?? [];
        const from = Math.max(0, Math.floor((end - needs) / blockSize));
        for (let at = from; at < end / blockSize; at += 1)
          if ((chain[at]?.copies[index] ?? 0) === 0) return false;
        return true;
      });
      if (isCached) return matched;
    }
    return 0;
  }

  #matchedOf({ index, blockSize }: Group, tokens: ArrayLike<number>): number {
    let matched = 0;
    for (const { copies } of this.#chain(tokens, blockSize)) {
      if ((copies[index] ?? 0) === 0) break;
      matched += blockSize;
    }
    return matched;
  }

  /** The recorded blocks of a prompt, from its first. */
  #chain(tokens: ArrayLike<number>, blockSize: number): Block[] {
    const chain: Block[] = [];
    let parent = ROOT;
    for (let at = 0; at + blockSize < tokens.length; at += blockSize) {
      const end = at + blockSize + this.#lookahead;
      const block = end > tokens.length ? undefined : this.#places.get(keyOf(parent, tokens, at, end));
      if (block === undefined) break;
      chain.push(block);
      parent = block.id;
    }
    return chain;
  }

  /** vLLM repeats the blocks that a request finds in the cache where the request has `kv_cache_report_mode` "full": these are no further copies. */
  #has(hashes: readonly string[], group: number): boolean {
    return hashes.every((hash) => (this.#blocks.get(hash)?.copies[group] ?? 0) > 0);
  }

  /** False where there are too many groups. Blocks of a part of a group's size, as vLLM caches them for layers with a state, do not change the size. */
  #learn({ index, needs }: CacheGroup, blockSize: number, isWhole: boolean): boolean {
    const known = this.#groups.get(index);
    if (known === undefined && this.#groups.size >= MAX_GROUPS) return false;
    this.#groups.set(index, {
      index,
      blockSize: Math.max(blockSize, known?.blockSize ?? 0),
      // vLLM 0.33 does not tell a group's kind. One that leaves blocks out needs those at the end of a prefix at least.
      needs: needs !== "all" ? needs : isWhole ? (known?.needs ?? "all") : 1,
    });
    return true;
  }

  #add(hash: string): Block | undefined {
    const known = this.#blocks.get(hash);
    if (known !== undefined) return known;
    if (this.#blocks.size >= this.#maxBlocks) {
      this.#refused += 1;
      return undefined;
    }
    const id = this.#freeIds.pop() ?? this.#nextId++;
    const block: Block = { id, hash, place: undefined, children: 0, copies: [] };
    this.#blocks.set(hash, block);
    return block;
  }

  #place(block: Block, parent: Block | undefined, key: number): void {
    if (block.place?.key === key) return;
    if (block.place !== undefined || block === parent || this.#places.has(key)) {
      this.#contradictions += 1;
      return;
    }
    block.place = { parent, key };
    this.#places.set(key, block);
    if (parent !== undefined) parent.children += 1;
  }

  /** Forgets a block that no group has, and the blocks before it that were kept for it. */
  #release(released: Block): void {
    let block: Block | undefined = released;
    while (block !== undefined && block.children === 0 && !block.copies.some((copies) => copies > 0)) {
      this.#blocks.delete(block.hash);
      this.#freeIds.push(block.id);
      const { place }: Block = block;
      if (place === undefined) return;
      this.#places.delete(place.key);
      block = place.parent;
      if (block !== undefined) block.children -= 1;
    }
  }
}

/** The place of a block: its parent's number and a hash of its tokens (FNV-1a over 32 bits each, with a final mix). */
function keyOf(parent: number, tokens: ArrayLike<number>, from: number, to: number): number {
  let hash = 0x811c9dc5;
  for (let at = from; at < to; at += 1) {
    const token = tokens[at] ?? 0;
    hash = Math.imul(hash ^ (token & 0xffff), 0x01000193);
    hash = Math.imul(hash ^ (token >>> 16), 0x01000193);
  }
  hash = Math.imul(hash ^ (hash >>> 16), 0x85ebca6b);
  hash = Math.imul(hash ^ (hash >>> 13), 0xc2b2ae35);
  return parent * 2 ** 32 + ((hash ^ (hash >>> 16)) >>> 0);
}
