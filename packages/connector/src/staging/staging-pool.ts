import { type BlockIds, type KvCaches, KvError } from "@kv/interface";

/**
 * Allocates the blocks of a staging pool. A request gets all of its blocks at once or waits in a
 * first-come, first-served queue. A request that does not fit blocks those behind it; otherwise a
 * large prompt could wait forever.
 */
export interface StagingPool {
  /** Blocks that can be allocated: all except block 0. */
  readonly capacity: number;
  readonly held: number;
  readonly waiting: number;
  /**
   * Allocates the given number of blocks per KV cache group. Returns undefined while the request
   * waits; the blocks are its own as soon as they are free. A second call for the same request
   * returns the same blocks.
   * @throws `KV_STAGING_FAILED` for more than the whole pool.
   */
  take(requestId: string, counts: readonly number[]): BlockIds | undefined;
  of(requestId: string): BlockIds | undefined;
  /** Frees the blocks of a request, or removes it from the queue, and then serves the queue. */
  free(requestId: string): void;
  clear(): void;
}

export function createStagingPool(poolBlocks: number): StagingPool {
  if (!Number.isSafeInteger(poolBlocks) || poolBlocks < 2) {
    throw new KvError(
      "KV_STAGING_FAILED",
      `a staging pool of ${poolBlocks} blocks has none to allocate`,
      {
        hint: "give the pool at least the blocks of one prompt, plus block 0",
      },
    );
  }
  const capacity = poolBlocks - 1;
  const taken = new Uint8Array(poolBlocks);
  const owners = new Map<string, BlockIds>();
  /** The requests that wait, and how many blocks per group they want. */
  const queue = new Map<string, readonly number[]>();
  let held = 0;

  function allocate(requestId: string, counts: readonly number[]): BlockIds {
    const ids = chooseFree(taken, total(counts));
    for (const id of ids) taken[id] = 1;
    held += ids.length;
    let at = 0;
    const blocks = counts.map((count) => {
      at += count;
      return ids.slice(at - count, at);
    });
    owners.set(requestId, blocks);
    return blocks;
  }

  function serve(): void {
    for (const [requestId, counts] of queue) {
      if (total(counts) > capacity - held) return;
      queue.delete(requestId);
      allocate(requestId, counts);
    }
  }

  return {
    capacity,
    get held() {
      return held;
    },
    get waiting() {
      return queue.size;
    },
    take(requestId, counts) {
      const known = owners.get(requestId);
      if (known !== undefined || queue.has(requestId)) return known;
      const wanted = total(counts);
      if (wanted > capacity) {
        throw new KvError(
          "KV_STAGING_FAILED",
          `request ${requestId} needs ${wanted} blocks of the staging pool, which has ${capacity}`,
          {
            hint: "give the pool more host memory, or send shorter prompts",
            details: { wanted, capacity },
          },
        );
      }
      if (queue.size === 0 && wanted <= capacity - held) return allocate(requestId, counts);
      queue.set(requestId, counts);
      return undefined;
    },
    of: (requestId) => owners.get(requestId),
    free(requestId) {
      queue.delete(requestId);
      for (const id of owners.get(requestId)?.flat() ?? []) {
        taken[id] = 0;
        held -= 1;
      }
      owners.delete(requestId);
      serve();
    },
    clear() {
      queue.clear();
      owners.clear();
      taken.fill(0);
      held = 0;
    },
  };
}

function total(counts: readonly number[]): number {
  return counts.reduce((sum, count) => sum + count, 0);
}

/**
 * `count` free ids: one consecutive run if there is one, because transports merge consecutive
 * blocks; otherwise the lowest. Block 0 is never allocated.
 */
function chooseFree(taken: Uint8Array, count: number): number[] {
  let run = 0;
  for (let id = 1; id < taken.length; id++) {
    run = taken[id] === 0 ? run + 1 : 0;
    if (run === count) return Array.from({ length: count }, (_, i) => id - count + 1 + i);
  }
  const ids: number[] = [];
  for (let id = 1; id < taken.length && ids.length < count; id++) if (taken[id] === 0) ids.push(id);
  return ids;
}

/**
 * Blocks that fit into a staging pool of `poolLengthBytes`, for a rank with these caches.
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
