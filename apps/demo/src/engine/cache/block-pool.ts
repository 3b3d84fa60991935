import { createHash } from "node:crypto";
import { KvError } from "@kv/interface";

/** Never given to a request: what a block table points at where there is no block (as in vLLM). */
export const NULL_BLOCK = 0;

export interface BlockPoolOptions {
  /** Blocks in all, the null block included. */
  readonly numBlocks: number;
  /** Keep the content of freed blocks until the room is needed, to be found by `lookup`. */
  readonly prefixCaching?: boolean;
  /** No two neighbours to one request, where it can be helped: a pool as it is after a long life. Default false. */
  readonly fragmented?: boolean;
}

/**
 * Which request holds which block of a paged KV cache. A block is held (referenced once or more), or free and empty, or free with
 * content that a later request may still take up by its hash; such content goes in the order in which it was freed.
 */
export interface BlockPool {
  /** Blocks that requests can hold: all but the null block. */
  readonly capacity: number;
  /** Blocks that `allocate` could give now, those with cached content included. */
  readonly free: number;
  /** Blocks that requests hold. */
  readonly held: number;
  /** Takes a reference on each block of the longest cached prefix of `hashes`. */
  lookup(hashes: readonly BlockHash[]): number[];
  /** Blocks with a reference each, in runs of consecutive ids where it can. Errors: `KV_OUT_OF_BLOCKS`; nothing is taken then. */
  allocate(count: number): number[];
  /** Names the content of a held block so that `lookup` finds it. A hash that is known already keeps its first block. */
  cache(blockId: number, hash: BlockHash): void;
  /** Gives back one reference on each. Pass a request's blocks in order: its last are reused first. */
  release(blockIds: readonly number[]): void;
  /** How often the block has been given out anew. A reference that was taken under an older one is stale. */
  generation(blockId: number): number;
  references(blockId: number): number;
  /** Forgets all cached content that no request holds. */
  dropCache(): void;
}

export function createBlockPool({
  numBlocks,
  prefixCaching = true,
  fragmented = false,
}: BlockPoolOptions): BlockPool {
  if (!Number.isSafeInteger(numBlocks) || numBlocks < 2) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `a block pool needs at least 2 blocks (one is the null block), not ${numBlocks}`,
    );
  }
  const references = new Uint32Array(numBlocks);
  const generations = new Float64Array(numBlocks);
  const hashOf = new Map<number, BlockHash>();
  const blockOf = new Map<BlockHash, number>();
  const empty = new Set<number>();
  // Insertion order is the order of release: the first is the least recently used.
  const cachedFree = new Set<number>();
  for (let id = 1; id < numBlocks; id++) empty.add(id);

  const freeCount = () => empty.size + cachedFree.size;

  function forget(id: number): void {
    const hash = hashOf.get(id);
    if (hash === undefined) return;
    hashOf.delete(id);
    if (blockOf.get(hash) === id) blockOf.delete(hash);
  }

  function checkHeld(id: number, doing: string): void {
    if (id <= NULL_BLOCK || id >= numBlocks || (references[id] ?? 0) === 0) {
      throw new KvError(
        "KV_INTERNAL",
        `${doing} block ${id}, which no request holds (blocks are 1 to ${numBlocks - 1})`,
      );
    }
  }

  return {
    capacity: numBlocks - 1,
    get free() {
      return freeCount();
    },
    get held() {
      return numBlocks - 1 - freeCount();
    },

    lookup(hashes) {
      const found: number[] = [];
      for (const hash of hashes) {
        const id = blockOf.get(hash);
        if (id === undefined) break;
        cachedFree.delete(id);
        references[id] = (references[id] ?? 0) + 1;
        found.push(id);
      }
      return found;
    },

    allocate(count) {
      if (count === 0) return [];
      if (count > freeCount()) {
        throw new KvError(
          "KV_OUT_OF_BLOCKS",
          `${count} blocks are asked for and ${freeCount()} of ${numBlocks - 1} are free`,
          {
            hint: "start the instance with more blocks (--num-blocks), or send fewer or shorter requests at once",
            details: { asked: count, free: freeCount(), capacity: numBlocks - 1 },
          },
        );
      }
      const candidates = [...empty];
      for (const id of cachedFree) {
        if (candidates.length >= count) break;
        candidates.push(id);
      }
      candidates.sort((a, b) => a - b);
      const chosen = fragmented ? apart(candidates, count) : chooseRuns(candidates, count);
      for (const id of chosen) {
        forget(id);
        empty.delete(id);
        cachedFree.delete(id);
        references[id] = 1;
        generations[id] = (generations[id] ?? 0) + 1;
      }
      return chosen;
    },

    cache(id, hash) {
      checkHeld(id, "caching");
      if (!prefixCaching || blockOf.has(hash) || hashOf.has(id)) return;
      hashOf.set(id, hash);
      blockOf.set(hash, id);
    },

    release(blockIds) {
      for (const id of [...blockIds].reverse()) {
        checkHeld(id, "releasing");
        const left = (references[id] ?? 0) - 1;
        references[id] = left;
        if (left > 0) continue;
        if (hashOf.has(id)) cachedFree.add(id);
        else empty.add(id);
      }
    },

    generation: (id) => generations[id] ?? 0,
    references: (id) => references[id] ?? 0,

    dropCache() {
      for (const id of cachedFree) {
        forget(id);
        empty.add(id);
      }
      cachedFree.clear();
    },
  };
}

/** Steps through the candidates by a stride that has no factor in common with their number, so each is met once. */
function apart(candidates: readonly number[], count: number): number[] {
  const { length } = candidates;
  let stride = Math.max(1, Math.floor(length * 0.618));
  while (commonFactor(stride, length) > 1) stride += 1;
  return Array.from({ length: count }, (_, i) => candidates[(i * stride) % length] ?? 0);
}

function commonFactor(a: number, b: number): number {
  return b === 0 ? a : commonFactor(b, a % b);
}

/** Consecutive block ids, `first` to `first + length - 1`. */
export interface BlockRun {
  readonly first: number;
  readonly length: number;
}

/** Splits ascending ids into maximal runs. */
export function runsOf(ascending: readonly number[]): BlockRun[] {
  const runs: { first: number; length: number }[] = [];
  for (const id of ascending) {
    const last = runs.at(-1);
    if (last !== undefined && last.first + last.length === id) last.length++;
    else runs.push({ first: id, length: 1 });
  }
  return runs;
}

/**
 * Chooses `count` of the given ascending ids in as few runs as it can: the shortest run that holds all of them, else the longest
 * runs first. NIXL merges descriptors only where both sides are consecutive, so a scattered choice costs up to 9 times
 * the transfer time.
 */
export function chooseRuns(ascending: readonly number[], count: number): number[] {
  const runs = runsOf(ascending);
  let fitting: BlockRun | undefined;
  for (const run of runs) {
    if (run.length >= count && (fitting === undefined || run.length < fitting.length)) fitting = run;
  }
  const chosen: number[] = [];
  const order =
    fitting === undefined ? runs.sort((a, b) => b.length - a.length || a.first - b.first) : [fitting];
  for (const run of order) {
    for (let i = 0; i < run.length && chosen.length < count; i++) chosen.push(run.first + i);
  }
  return chosen;
}

/** Identifies the content of a full block: its tokens and, through the parent's hash, all tokens before them. */
export type BlockHash = string;

/**
 * Hashes of the full blocks of a prompt, each chained to the one before, so that equal hashes mean equal prefixes (the idea
 * of vLLM's prefix cache). Tokens of an incomplete last block have no hash.
 */
export function blockHashes(tokens: ArrayLike<number>, blockSize: number): BlockHash[] {
  const hashes: BlockHash[] = [];
  let parent = "";
  for (let end = blockSize; end <= tokens.length; end += blockSize) {
    const block = Int32Array.from({ length: blockSize }, (_, i) => tokens[end - blockSize + i] ?? 0);
    parent = createHash("sha256").update(parent).update(block).digest("base64");
    hashes.push(parent);
  }
  return hashes;
}
