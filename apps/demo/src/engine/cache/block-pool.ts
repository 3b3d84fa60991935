import { KvError } from "@kv/interface";
import { nameOf, blockHashes as vllmHashes } from "@kv/tier";

export interface BlockPoolOptions {
  /** vLLM's null block, 0, included, which no request gets. */
  readonly numBlocks: number;
  readonly fragmented?: boolean | undefined;
  readonly onChange?: ((change: CacheChange) => void) | undefined;
}

/** What KV events tell: a prefix of which the blocks from `first` are new, or a block that left. */
export type CacheChange =
  | {
      readonly stored: readonly BlockHash[];
      readonly first: number;
      readonly tokens: readonly number[];
    }
  | { readonly removed: BlockHash };

/** Identifies the tokens of a full block and all tokens before them: vLLM's hash, in base64. */
export type BlockHash = string;

export const blockHashOf = (hash: Uint8Array): BlockHash => nameOf(hash);

/** `last`: of the block before. */
export function blockHashes(
  tokens: ArrayLike<number>,
  blockSize: number,
  last?: BlockHash,
): BlockHash[] {
  const after = last === undefined ? undefined : Buffer.from(last, "base64");
  return vllmHashes(tokens, { blockSize, after }).map(blockHashOf);
}

/**
 * Assigns the blocks of a paged KV cache to requests. A block is held, free and empty, or free with
 * content that a later request may reuse by its hash; the content that was freed first is evicted
 * first.
 */
export class BlockPool {
  readonly capacity: number;
  readonly #fragmented: boolean;
  readonly #onChange: (change: CacheChange) => void;
  readonly #references: Uint32Array;
  readonly #hashOf = new Map<number, BlockHash>();
  readonly #blockOf = new Map<BlockHash, number>();
  readonly #empty = new Set<number>();
  readonly #reusable = new Set<number>();

  constructor({ numBlocks, fragmented = false, onChange = () => {} }: BlockPoolOptions) {
    if (!Number.isSafeInteger(numBlocks) || numBlocks < 2) {
      throw new KvError(
        "KV_CONFIG_INVALID",
        `a block pool needs at least 2 blocks (one is the null block), not ${numBlocks}`,
      );
    }
    this.capacity = numBlocks - 1;
    this.#fragmented = fragmented;
    this.#onChange = onChange;
    this.#references = new Uint32Array(numBlocks);
    for (let id = 1; id < numBlocks; id++) this.#empty.add(id);
  }

  get free(): number {
    return this.#empty.size + this.#reusable.size;
  }

  get held(): number {
    return this.capacity - this.free;
  }

  lookup(hashes: readonly BlockHash[]): number[] {
    const found: number[] = [];
    for (const hash of hashes) {
      const id = this.#blockOf.get(hash);
      if (id === undefined) break;
      this.#reusable.delete(id);
      this.#references[id] = (this.#references[id] ?? 0) + 1;
      found.push(id);
    }
    return found;
  }

  /**
   * Takes a reference on each of `count` free blocks, consecutive ones where possible.
   * @throws `KV_OUT_OF_BLOCKS`; nothing is taken then.
   */
  allocate(count: number): number[] {
    if (count === 0) return [];
    if (count > this.free) {
      throw new KvError(
        "KV_OUT_OF_BLOCKS",
        `${count} blocks are needed, and ${this.free} of ${this.capacity} are free`,
        {
          hint: "start the instance with more blocks (--num-blocks), or send fewer or shorter requests at once",
          details: { asked: count, free: this.free, capacity: this.capacity },
        },
      );
    }
    const candidates = [...this.#empty];
    for (const id of this.#reusable) {
      if (candidates.length >= count) break;
      candidates.push(id);
    }
    candidates.sort((a, b) => a - b);
    const chosen = this.#fragmented
      ? chooseScattered(candidates, count)
      : chooseRuns(candidates, count);
    for (const id of chosen) {
      this.#evict(id);
      this.#empty.delete(id);
      this.#reusable.delete(id);
      this.#references[id] = 1;
    }
    return chosen;
  }

  /** A hash that is already cached keeps its block. */
  cachePrefix(
    ids: readonly number[],
    hashes: readonly BlockHash[],
    tokens: readonly number[],
  ): void {
    let first = hashes.length;
    for (const [at, hash] of hashes.entries()) {
      const id = ids[at] as number;
      this.#checkHeld(id, "caching");
      if (this.#blockOf.has(hash) || this.#hashOf.has(id)) continue;
      this.#hashOf.set(id, hash);
      this.#blockOf.set(hash, id);
      first = Math.min(first, at);
    }
    if (first < hashes.length) this.#onChange({ stored: hashes, first, tokens });
  }

  forgetContent(): void {
    for (const removed of this.#blockOf.keys()) this.#onChange({ removed });
    for (const id of this.#reusable) this.#empty.add(id);
    this.#reusable.clear();
    this.#hashOf.clear();
    this.#blockOf.clear();
  }

  /** Returns one reference on each block; the last ones are reused first. */
  release(blockIds: readonly number[]): void {
    for (const id of [...blockIds].reverse()) {
      this.#checkHeld(id, "releasing");
      const left = (this.#references[id] ?? 0) - 1;
      this.#references[id] = left;
      if (left > 0) continue;
      if (this.#hashOf.has(id)) this.#reusable.add(id);
      else this.#empty.add(id);
    }
  }

  #evict(id: number): void {
    const hash = this.#hashOf.get(id);
    if (hash === undefined) return;
    this.#hashOf.delete(id);
    if (this.#blockOf.get(hash) !== id) return;
    this.#blockOf.delete(hash);
    this.#onChange({ removed: hash });
  }

  #checkHeld(id: number, action: string): void {
    if (id > 0 && id <= this.capacity && (this.#references[id] ?? 0) > 0) return;
    throw new KvError(
      "KV_INTERNAL",
      `${action} block ${id}, which no request holds (blocks are 1 to ${this.capacity})`,
    );
  }
}

export function runsOf(ascending: readonly number[]): number[][] {
  const runs: number[][] = [];
  for (const id of ascending) {
    const last = runs.at(-1);
    if (last?.at(-1) === id - 1) last.push(id);
    else runs.push([id]);
  }
  return runs;
}

/**
 * Chooses `count` of the ascending ids in as few runs as possible: NIXL merges descriptors only
 * where both sides are consecutive; scattered blocks take up to 9 times as long to transfer.
 */
export function chooseRuns(ascending: readonly number[], count: number): number[] {
  const runs = runsOf(ascending);
  const [shortest] = runs.filter((run) => run.length >= count).sort((a, b) => a.length - b.length);
  return (shortest ?? runs.sort((a, b) => b.length - a.length).flat()).slice(0, count);
}

/** A stride without a common factor with their number chooses each at most once. */
function chooseScattered(candidates: readonly number[], count: number): number[] {
  const { length } = candidates;
  let stride = Math.max(1, Math.floor(length * 0.618));
  while (greatestCommonDivisor(stride, length) > 1) stride += 1;
  return Array.from({ length: count }, (_, i) => candidates[(i * stride) % length] ?? 0);
}

function greatestCommonDivisor(a: number, b: number): number {
  return b === 0 ? a : greatestCommonDivisor(b, a % b);
}
