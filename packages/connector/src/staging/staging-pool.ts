import { type BlockIds, type KvCaches, KvError } from "@kv/interface";

/**
 * Gives a request all of its blocks at once, or queues it, first come, first served. A waiting
 * request blocks later ones, so that a large prompt cannot wait forever.
 */
export class StagingPool {
  /** All blocks except block 0. */
  readonly capacity: number;
  readonly #taken: Uint8Array;
  readonly #owners = new Map<string, BlockIds>();
  readonly #queue = new Map<string, readonly number[]>();
  #held = 0;

  /** @throws `KV_STAGING_FAILED`. */
  constructor(poolBlocks: number) {
    if (!Number.isSafeInteger(poolBlocks) || poolBlocks < 2) {
      throw new KvError(
        "KV_STAGING_FAILED",
        `a staging pool of ${poolBlocks} blocks has none to allocate`,
        { hint: "give the pool at least the blocks of one prompt, plus block 0" },
      );
    }
    this.capacity = poolBlocks - 1;
    this.#taken = new Uint8Array(poolBlocks);
  }

  get held(): number {
    return this.#held;
  }

  get waiting(): number {
    return this.#queue.size;
  }

  /**
   * Allocates blocks per KV cache group. Undefined while the request waits; a repeated call returns
   * the same blocks.
   * @throws `KV_STAGING_FAILED` for more than the whole pool.
   */
  take(requestId: string, counts: readonly number[]): BlockIds | undefined {
    if (this.#owners.has(requestId) || this.#queue.has(requestId)) return this.of(requestId);
    const wanted = total(counts);
    if (wanted > this.capacity) {
      const { capacity } = this;
      throw new KvError(
        "KV_STAGING_FAILED",
        `request ${requestId} needs ${wanted} blocks of the staging pool, which has ${capacity}`,
        {
          hint: "give the pool more host memory, or send shorter prompts",
          details: { wanted, capacity },
        },
      );
    }
    this.#queue.set(requestId, counts);
    this.#serve();
    return this.of(requestId);
  }

  of(requestId: string): BlockIds | undefined {
    return this.#owners.get(requestId);
  }

  /** Frees a request's blocks or takes it out of the queue, then serves the queue. */
  free(requestId: string): void {
    this.#queue.delete(requestId);
    for (const id of this.of(requestId)?.flat() ?? []) {
      this.#taken[id] = 0;
      this.#held -= 1;
    }
    this.#owners.delete(requestId);
    this.#serve();
  }

  clear(): void {
    this.#queue.clear();
    this.#owners.clear();
    this.#taken.fill(0);
    this.#held = 0;
  }

  #serve(): void {
    for (const [requestId, counts] of this.#queue) {
      if (total(counts) > this.capacity - this.#held) return;
      this.#queue.delete(requestId);
      const ids = this.#chooseFree(total(counts));
      for (const id of ids) this.#taken[id] = 1;
      this.#held += ids.length;
      let at = 0;
      const blocks = counts.map((count) => {
        at += count;
        return ids.slice(at - count, at);
      });
      this.#owners.set(requestId, blocks);
    }
  }

  /** Prefers one consecutive run, which transports merge. Never returns block 0. */
  #chooseFree(count: number): number[] {
    const free: number[] = [];
    let run = 0;
    for (let id = 1; id <= this.capacity; id++) {
      if (this.#taken[id] === 0) free.push(id);
      run = this.#taken[id] === 0 ? run + 1 : 0;
      if (run === count) return free.slice(free.length - count);
    }
    return free.slice(0, count);
  }
}

function total(counts: readonly number[]): number {
  return counts.reduce((sum, count) => sum + count, 0);
}

/**
 * Blocks that fit into a pool of `poolLengthBytes` on a rank with these caches.
 * @throws `KV_STAGING_FAILED` for fewer than two.
 */
export function stagingPoolBlocks(caches: KvCaches, poolLengthBytes: number): number {
  const blockLengthBytes = caches.regions.reduce((sum, region) => sum + region.blockLengthBytes, 0);
  const blocks = Math.floor(poolLengthBytes / blockLengthBytes);
  if (blocks >= 2) return blocks;
  throw new KvError(
    "KV_STAGING_FAILED",
    `a staging pool of ${poolLengthBytes} bytes holds ${blocks} blocks of ${blockLengthBytes} bytes over all layers; it needs two`,
    { hint: "give the pool more host memory" },
  );
}
