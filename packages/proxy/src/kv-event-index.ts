import type { Instance } from "./instance.js";

/** What instances hold in their prefix caches, as far as they say so. */
export interface CachedPrefixes {
  /** How many tokens of a prompt, from its begin, an instance holds; undefined for one that does not publish. */
  matchedTokens(instance: Instance, tokens: readonly number[]): number | undefined;
  /** Subscribes to those that publish, and forgets those that are gone. */
  follow(instances: readonly Instance[]): void;
  close(): void;
}

export interface StoredBlocks {
  readonly hashes: readonly string[];
  readonly parent: string | undefined;
  readonly tokens: readonly number[];
  readonly blockSize: number;
}

/** The blocks of one instance: a tree of token runs, by vLLM's own hashes, whose computation is not repeated here. */
export interface BlockIndex {
  stored(blocks: StoredBlocks): void;
  removed(hashes: readonly string[]): void;
  cleared(): void;
  matchedTokens(tokens: readonly number[]): number;
  readonly size: number;
}

export function createBlockIndex(maxBlocks = 1_000_000): BlockIndex {
  /** From a parent's hash and a block's tokens to the block's hash. */
  const children = new Map<string, string>();
  const keyOf = new Map<string, string>();
  let blockSize = 0;
  const key = (parent: string | undefined, tokens: readonly number[]) =>
    `${parent ?? ""}:${tokens.join(",")}`;

  return {
    stored(blocks) {
      blockSize = blocks.blockSize;
      let { parent } = blocks;
      for (const [at, hash] of blocks.hashes.entries()) {
        if (keyOf.size >= maxBlocks) return;
        const own = key(parent, blocks.tokens.slice(at * blockSize, (at + 1) * blockSize));
        children.set(own, hash);
        keyOf.set(hash, own);
        parent = hash;
      }
    },
    removed(hashes) {
      for (const hash of hashes) {
        const own = keyOf.get(hash);
        if (own === undefined) continue;
        keyOf.delete(hash);
        if (children.get(own) === hash) children.delete(own);
      }
    },
    cleared() {
      children.clear();
      keyOf.clear();
    },
    matchedTokens(tokens) {
      if (blockSize === 0) return 0;
      let parent: string | undefined;
      let at = 0;
      while (at + blockSize <= tokens.length) {
        const hash = children.get(key(parent, tokens.slice(at, at + blockSize)));
        if (hash === undefined) break;
        parent = hash;
        at += blockSize;
      }
      return at;
    },
    get size() {
      return keyOf.size;
    },
  };
}
