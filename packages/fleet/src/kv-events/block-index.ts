import type { Instance } from "../instances/instance.js";
import { type BlockGeometry, BlockHolders, chainOf, type PromptHolders } from "./block-holders.js";
import { BlockTable, mixed, ROOT } from "./block-table.js";
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

/** What is known of a group: the size of its blocks, and which blocks before a position it needs. */
interface Group extends CacheGroup {
  readonly blockSize: number;
}

const MAX_GROUPS = 32;

/** The table of all instances that an index keeps up to date. */
export interface SharedHolders {
  readonly holders: BlockHolders;
  /** The instance of the index. */
  readonly instance: Instance;
}

/**
 * The prefix cache of one instance as its KV events describe it: a tree of blocks, placed by the hash of their parent and by their tokens. The hashes are
 * taken from the events and not computed here; that of tokens is this class's own, of 32 bits: a wrong match costs a request its best instance.
 */
export class BlockIndex {
  readonly #maxBlocks: number;
  #blocks = new BlockTable();
  readonly #groups = new Map<number, Group>();
  #refused = 0;
  #contradictions = 0;
  /** Tokens after a block that its hash covers too. */
  #lookahead = 0;
  readonly #shared: SharedHolders | undefined;
  /** The geometries of its blocks, with the chain before the first block. */
  readonly #geometries = new Map<string, BlockGeometry & { readonly chain: number }>();

  /** Blocks above `maxBlocks` are not recorded. */
  constructor(maxBlocks = 500_000, shared?: SharedHolders) {
    this.#maxBlocks = maxBlocks;
    this.#shared = shared;
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
    const blocks = this.#blocks;
    // A parent that is not recorded, because its event was missed, may be recorded later.
    const first = parent === undefined || !isWhole ? ROOT : this.#add(parent);
    if (first === undefined) return;
    let before = first;
    for (const [at, hash] of hashes.entries()) {
      const block = this.#add(hash);
      if (block === undefined) break;
      blocks.addCopies(block, group.index, count);
      if (isWhole) {
        const after = lookahead?.[at] ?? [];
        this.#lookahead = after.length;
        let key = withTokens(NO_TOKENS, tokens, at * blockSize, (at + 1) * blockSize);
        key = withTokens(key, after, 0, after.length);
        this.#place(block, before, mixed(key), before === ROOT ? this.#firstChain(blockSize) : undefined);
      }
      this.#shareBlock(block);
      before = block;
    }
    if (first !== ROOT) this.#release(first);
  }

  /** Removes a copy of blocks that were evicted. */
  removed({ hashes, group }: RemovedBlocks): void {
    for (const hash of hashes) {
      const block = this.#blocks.find(hash);
      if (block === 0) continue;
      this.#blocks.addCopies(block, group, -1);
      this.#unshareBlock(block);
      this.#release(block);
    }
  }

  /** Removes all blocks. */
  cleared(): void {
    if (this.#shared !== undefined) {
      const { holders, instance } = this.#shared;
      for (const block of this.#blocks.chained())
        if (this.#isRecorded(block)) holders.remove(this.#blocks.chain(block), instance);
      for (const geometry of this.#geometries.values()) holders.closed(geometry);
      this.#geometries.clear();
    }
    this.#blocks = new BlockTable();
    this.#groups.clear();
    this.#refused = 0;
  }

  /**
   * How many tokens of a prompt, from its first, vLLM takes from its cache: the longest begin of which each KV cache group has the blocks that it needs. At
   * least the last token is computed.
   */
  matchedTokens(tokens: ArrayLike<number>): number {
    const groups = [...this.#groups.values()];
    const [first] = groups;
    if (first === undefined) return 0;
    if (groups.length === 1 && first.needs === "all") return this.#fullyCached(tokens, first);
    const sizes = [...new Set(groups.map(({ blockSize }) => blockSize))];
    const chains = new Map(sizes.map((size) => [size, this.#chain(tokens, size)]));
    const step = Math.max(1, ...sizes);
    // What all groups with full attention have.
    let matched = Number.POSITIVE_INFINITY;
    for (const { index, blockSize, needs } of groups) {
      const chain = chains.get(blockSize) ?? [];
      let length = needs === "all" ? 0 : chain.length;
      if (needs === "all") while (this.#blocks.copies(chain[length] ?? ROOT, index) > 0) length += 1;
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
          if (this.#blocks.copies(chain[at] ?? ROOT, index) === 0) return false;
        return true;
      });
      if (isCached) return matched;
    }
    return 0;
  }

  /** As `matchedTokens`, for the only group of most models. */
  #fullyCached(tokens: ArrayLike<number>, { index, blockSize }: Group): number {
    const keys = keysOf(tokens, blockSize, this.#lookahead);
    let parent = ROOT;
    for (let at = 0; ; at += 1) {
      const key = keys.at(at);
      const block = key === undefined ? 0 : this.#blocks.at(parent, key);
      if (block === 0 || this.#blocks.copies(block, index) === 0) return at * blockSize;
      parent = block;
    }
  }

  /** The recorded blocks of a prompt, from its first. */
  #chain(tokens: ArrayLike<number>, blockSize: number): number[] {
    const chain: number[] = [];
    const keys = keysOf(tokens, blockSize, this.#lookahead);
    let parent = ROOT;
    for (let at = 0; ; at += 1) {
      const key = keys.at(at);
      const block = key === undefined ? 0 : this.#blocks.at(parent, key);
      if (block === 0) break;
      chain.push(block);
      parent = block;
    }
    return chain;
  }

  /** vLLM repeats the blocks that a request finds in the cache where the request has `kv_cache_report_mode` "full": these are no further copies. */
  #has(hashes: readonly string[], group: number): boolean {
    return hashes.every((hash) => this.#blocks.copies(this.#blocks.find(hash), group) > 0);
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
    if (this.#groups.size > 1 || this.#groups.get(index)?.needs !== "all")
      this.#shared?.holders.hasGroups(this.#shared.instance);
    return true;
  }

  /** Undefined where there are too many blocks. */
  #add(hash: string): number | undefined {
    if (this.#blocks.size < this.#maxBlocks) return this.#blocks.add(hash);
    const known = this.#blocks.find(hash);
    if (known !== 0) return known;
    this.#refused += 1;
    return undefined;
  }

  #place(block: number, parent: number, tokens: number, firstChain: number | undefined): void {
    const blocks = this.#blocks;
    if (!blocks.isAt(block, parent, tokens)) {
      if (blocks.parentOf(block) !== undefined || block === parent || blocks.at(parent, tokens) !== 0) {
        this.#contradictions += 1;
        return;
      }
      blocks.place(block, parent, tokens);
    }
    if (this.#shared === undefined || blocks.chain(block) !== 0) return;
    const before = firstChain ?? blocks.chain(parent);
    // A block whose parent comes later has none: then its instance is found by a shorter begin of the prompt.
    if (before !== 0) blocks.setChain(block, chainOf(before, tokens));
  }

  /** The chain before the first block of a prompt; 0 where it is not followed. */
  #firstChain(blockSize: number): number {
    if (this.#shared === undefined) return 0;
    const lookahead = this.#lookahead;
    const key = `${blockSize} ${lookahead}`;
    let known = this.#geometries.get(key);
    if (known === undefined) {
      const chain = this.#shared.holders.open({ blockSize, lookahead });
      if (chain === 0) return 0;
      known = { blockSize, lookahead, chain };
      this.#geometries.set(key, known);
    }
    return known.chain;
  }

  #isRecorded(block: number): boolean {
    return BlockHolders.isRecorded(this.#blocks.chain(block), this.#blocks.parentOf(block) === ROOT);
  }

  #shareBlock(block: number): void {
    if (this.#shared === undefined || !this.#isRecorded(block)) return;
    const { holders, instance } = this.#shared;
    if (this.#blocks.hasCopies(block)) holders.add(this.#blocks.chain(block), instance);
  }

  #unshareBlock(block: number): void {
    if (this.#shared === undefined || !this.#isRecorded(block)) return;
    const { holders, instance } = this.#shared;
    if (!this.#blocks.hasCopies(block)) holders.remove(this.#blocks.chain(block), instance);
  }

  /** Forgets a block that no group has, and the blocks before it that were kept for it. */
  #release(released: number): void {
    const blocks = this.#blocks;
    let block = released;
    while (block !== ROOT && blocks.children(block) === 0 && !blocks.hasCopies(block)) {
      const parent = blocks.parentOf(block) ?? ROOT;
      blocks.remove(block);
      if (parent !== ROOT) blocks.childRemoved(parent);
      block = parent;
    }
  }
}

/** The hashes of the tokens of a prompt's blocks, each computed when it is asked for first. */
class PromptKeys {
  readonly #keys: number[] = [];

  constructor(
    readonly tokens: ArrayLike<number>,
    readonly blockSize: number,
    readonly lookahead: number,
  ) {}

  /** Undefined for a block that is not full; at least the last token is computed. */
  at(block: number): number | undefined {
    const { tokens, blockSize, lookahead } = this;
    const from = block * blockSize;
    const to = from + blockSize + lookahead;
    if (from + blockSize >= tokens.length || to > tokens.length) return undefined;
    this.#keys[block] ??= mixed(withTokens(NO_TOKENS, tokens, from, to));
    return this.#keys[block];
  }
}

/** Of the prompt that was looked up last: a router looks it up in the index of each instance, one after another. */
let lastKeys = new PromptKeys([], 1, 0);

function keysOf(tokens: ArrayLike<number>, blockSize: number, lookahead: number): PromptKeys {
  const isLast =
    lastKeys.tokens === tokens && lastKeys.blockSize === blockSize && lastKeys.lookahead === lookahead;
  if (!isLast) lastKeys = new PromptKeys(tokens, blockSize, lookahead);
  return lastKeys;
}

/** The instances that may have a begin of a prompt, the longest begin first. */
export function holdersOfPrompt(holders: BlockHolders, tokens: ArrayLike<number>): PromptHolders[] {
  return holders.longestFirst(({ blockSize, lookahead }) => {
    const keys = keysOf(tokens, blockSize, lookahead);
    return (block) => keys.at(block);
  });
}

const NO_TOKENS = 0x811c9dc5;

/** A hash of the tokens before it and of further ones (FNV-1a over 32 bits each). */
function withTokens(before: number, tokens: ArrayLike<number>, from: number, to: number): number {
  let hash = before;
  for (let at = from; at < to; at += 1) {
    const token = tokens[at] ?? 0;
    hash = Math.imul(hash ^ (token & 0xffff), 0x01000193);
    hash = Math.imul(hash ^ (token >>> 16), 0x01000193);
  }
  return hash;
}
