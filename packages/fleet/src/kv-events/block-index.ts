/** A run of blocks that an instance has stored in its prefix cache, each the child of the one before. */
export interface StoredBlocks {
  /** vLLM's hashes of the blocks, as text. */
  readonly hashes: readonly string[];
  /** Hash of the block before the first; undefined where the run begins a prompt. */
  readonly parent: string | undefined;
  /** Token ids of all blocks, in order. */
  readonly tokens: readonly number[];
  /** Tokens in a block. */
  readonly blockSize: number;
}

/**
 * The prefix cache of one instance as its KV events describe it: a tree of blocks, linked by vLLM's hashes. The hashes are taken from the
 * events and not computed here.
 */
export class BlockIndex {
  readonly #maxBlocks: number;
  /** From a parent's hash and a block's tokens to the block's hash. */
  readonly #hashOf = new Map<string, string>();
  /** From a block's hash to its key in `#hashOf`. */
  readonly #keyOf = new Map<string, string>();
  #blockSize = 0;

  /** Blocks above `maxBlocks` are not recorded. */
  constructor(maxBlocks = 1_000_000) {
    this.#maxBlocks = maxBlocks;
  }

  /** How many blocks are recorded. */
  get size(): number {
    return this.#keyOf.size;
  }

  /** Records blocks that were stored. */
  stored({ hashes, parent, tokens, blockSize }: StoredBlocks): void {
    this.#blockSize = blockSize;
    let parentHash = parent;
    for (const [at, hash] of hashes.entries()) {
      if (this.#keyOf.size >= this.#maxBlocks) return;
      const key = keyOf(parentHash, tokens.slice(at * blockSize, (at + 1) * blockSize));
      this.#hashOf.set(key, hash);
      this.#keyOf.set(hash, key);
      parentHash = hash;
    }
  }

  /** Removes blocks that were evicted. */
  removed(hashes: readonly string[]): void {
    for (const hash of hashes) {
      const key = this.#keyOf.get(hash);
      if (key === undefined) continue;
      this.#keyOf.delete(hash);
      if (this.#hashOf.get(key) === hash) this.#hashOf.delete(key);
    }
  }

  /** Removes all blocks. */
  cleared(): void {
    this.#hashOf.clear();
    this.#keyOf.clear();
  }

  /** How many tokens of a prompt, from its first, are in recorded blocks. */
  matchedTokens(tokens: readonly number[]): number {
    const blockSize = this.#blockSize;
    if (blockSize === 0) return 0;
    let parent: string | undefined;
    let matched = 0;
    while (matched + blockSize <= tokens.length) {
      const hash = this.#hashOf.get(keyOf(parent, tokens.slice(matched, matched + blockSize)));
      if (hash === undefined) break;
      parent = hash;
      matched += blockSize;
    }
    return matched;
  }
}

function keyOf(parent: string | undefined, tokens: readonly number[]): string {
  return `${parent ?? ""}:${tokens.join(",")}`;
}
