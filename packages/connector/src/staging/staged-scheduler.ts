import {
  type BlockIds,
  type ConnectorRequest,
  type KvCacheConfig,
  type KvCaches,
  KvError,
  type SchedulerConnector,
} from "@kv/interface";
import { cacheKind, groupBlockTokens } from "@kv/plan";
import { peerTraceparent } from "@kv/protocol";
import { delegateTo } from "../multi-connector.js";
import { traceMember } from "../requests/references.js";
import type { StagedRequest, StagingOrders } from "./staged-worker.js";

const noOrders = (): StagingOrders => ({ saves: [], saved: [], loads: [], over: [] });

/**
 * The scheduler side with staging: the inner connector sees only pool blocks.
 * @throws `KV_PLATFORM_UNSUPPORTED` for groups whose blocks do not stand for tokens.
 */
export function stagedScheduler(
  inner: SchedulerConnector,
  cache: KvCacheConfig,
  poolBlocks: number,
): SchedulerConnector {
  requireTokens(cache);
  const pool = new StagingPool(poolBlocks);
  const blockTokens = groupBlockTokens(cache);
  const hits = new Map<string, { readonly tokens: number; readonly byGroup: readonly number[] }>();
  let orders = noOrders();

  /** Each group's blocks from its own `from` to `until`. */
  const spansOf = (from: readonly number[], until: number): readonly Span[] =>
    blockTokens.map((tokens, group) =>
      cache.groups[group]?.enableKvTransfer === false
        ? [0, 0]
        : [Math.floor((from[group] ?? 0) / tokens), Math.ceil(until / tokens)],
    );

  /**
   * Pairs each pool block with its device block.
   * @throws `KV_STAGING_FAILED` where the pool is full and the engine does not support `wait`, or
   * has not allocated all blocks: the others would never be copied.
   */
  function pair(
    { requestId, traceparent, kvTransferParams }: ConnectorRequest,
    blockIds: BlockIds,
    spans: readonly Span[],
    numTokens: number,
  ): StagedRequest {
    const wire = pool.take(requestId, countsOf(spans));
    if (wire === undefined) {
      throw new KvError(
        "KV_STAGING_FAILED",
        `request ${requestId} was admitted while the staging pool has no room for it`,
        { hint: "leave a request in the queue while matchedTokens returns wait" },
      );
    }
    const device = blockIds.map((ids, group) => ids.slice(...(spans[group] ?? [0, 0])));
    for (const [group, { length: needed }] of wire.entries()) {
      const given = device[group]?.length ?? 0;
      if (given === needed) continue;
      throw new KvError(
        "KV_STAGING_FAILED",
        `request ${requestId} was admitted with ${given} blocks of KV cache group ${group}, and its tokens need ${needed}`,
        {
          hint: "allocate the blocks of the whole prompt when the request is admitted",
          details: { group, given, needed },
        },
      );
    }
    const trace = traceMember(traceparent ?? peerTraceparent(kvTransferParams));
    return { requestId, numTokens, ...trace, device, wire };
  }

  function release(requestId: string): void {
    hits.delete(requestId);
    orders.saves = orders.saves.filter((save) => save.requestId !== requestId);
    orders.loads = orders.loads.filter((load) => load.requestId !== requestId);
    if (pool.of(requestId) !== undefined) orders.over.push(requestId);
    pool.free(requestId);
  }

  return delegateTo(inner, {
    matchedTokens(request, numComputedTokens, computedTokens) {
      const { requestId, numPromptTokens } = request;
      const matched = inner.matchedTokens(request, numComputedTokens, computedTokens);
      if (matched.wait === true || (matched.tokens === 0 && !isProduced(request))) return matched;
      let spans = spansOf([], numPromptTokens);
      if (matched.tokens > 0) {
        const byGroup = computedTokens ?? blockTokens.map(() => numComputedTokens);
        // The prefix cache changed while the request waited, so it needs other numbers of blocks.
        if (hits.get(requestId)?.byGroup.join() !== byGroup.join()) pool.free(requestId);
        hits.set(requestId, { tokens: numComputedTokens, byGroup });
        spans = spansOf(byGroup, numComputedTokens + matched.tokens);
      }
      // A request waits for pool blocks, within its timeout, before it has device blocks.
      try {
        const wire = pool.take(requestId, countsOf(spans));
        return wire === undefined ? { ...matched, wait: true } : matched;
      } catch (error) {
        // It never fits: the peer's blocks are released.
        inner.requestFinished(request, [], "error");
        throw error;
      }
    },
    afterAllocation(request, blockIds, externalTokens, computedTokens) {
      const { requestId, numPromptTokens } = request;
      if (externalTokens > 0) {
        const hit = hits.get(requestId) ?? { tokens: 0, byGroup: blockTokens.map(() => 0) };
        requireSameHit(requestId, hit.byGroup, computedTokens);
        const numTokens = hit.tokens + externalTokens;
        const spans = spansOf(hit.byGroup, numTokens);
        const load = pair(request, blockIds, spans, numTokens);
        orders.loads.push(load);
        const inPrompt = inPlace(load.wire, spans);
        inner.afterAllocation(request, inPrompt, externalTokens, hit.byGroup);
      } else if (isProduced(request)) {
        const save = pair(request, blockIds, spansOf([], numPromptTokens), numPromptTokens);
        orders.saves = [...orders.saves.filter((other) => other.requestId !== requestId), save];
        inner.afterAllocation(request, save.wire, 0);
      } else inner.afterAllocation(request, blockIds, externalTokens);
    },
    buildStepMetadata() {
      const metadata = inner.buildStepMetadata();
      const staging = orders;
      if (Object.values(staging).every(({ length }) => length === 0)) return metadata;
      orders = noOrders();
      return { ...metadata, staging };
    },
    requestFinished(request, blockIds, reason) {
      const { requestId } = request;
      const wire = pool.of(requestId) ?? blockIds.map(() => []);
      const finished = inner.requestFinished(request, wire, reason);
      if (!finished.keepBlocks) release(requestId);
      else if (isProduced(request)) orders.saved.push(requestId);
      return finished;
    },
    applyWorkerOutput(output) {
      const atRisk = output.failedReceiving.filter(({ blocksAtRisk }) => blocksAtRisk === true);
      inner.applyWorkerOutput(output);
      for (const requestId of output.finishedSending) release(requestId);
      for (const requestId of output.finishedReceiving)
        if (!atRisk.some((failure) => failure.requestId === requestId)) release(requestId);
    },
    hasPendingWork: () =>
      orders.saves.length + orders.loads.length + orders.over.length > 0 || inner.hasPendingWork(),
    outstanding: () => ({
      ...inner.outstanding(),
      stagedBlocks: pool.held,
      stagingWaits: pool.waiting,
      stagingHits: hits.size,
    }),
    async close() {
      pool.clear();
      await inner.close();
    },
  });
}

/** @throws `KV_STAGING_FAILED`: the pool's blocks are those after the matched prefix hit. */
function requireSameHit(
  requestId: string,
  matched: readonly number[],
  computed: readonly number[] | undefined,
): void {
  if (computed === undefined || computed.join() === matched.join()) return;
  throw new KvError(
    "KV_STAGING_FAILED",
    `request ${requestId} was admitted with ${computed.join(", ")} computed tokens by KV cache group, and ${matched.join(", ")} were matched`,
    { hint: "call matchedTokens again when the prefix hit has changed" },
  );
}

type Span = readonly [first: number, end: number];

const countsOf = (spans: readonly Span[]): readonly number[] =>
  spans.map(([first, end]) => end - first);

/** Puts pool blocks in the prompt's places, with block 0 before each span. */
function inPlace(wire: BlockIds, spans: readonly Span[]): BlockIds {
  return wire.map((ids, group) => [...new Array<number>(spans[group]?.[0] ?? 0).fill(0), ...ids]);
}

/** Pool blocks are taken by tokens, before the engine has allocated any of its own. */
function requireTokens({ groups }: KvCacheConfig): void {
  for (const [group, { kind, enableKvTransfer }] of groups.entries()) {
    if (enableKvTransfer === false) continue;
    const { extent } = cacheKind(kind);
    if (extent === "sequence" || extent === "window") continue;
    throw new KvError(
      "KV_PLATFORM_UNSUPPORTED",
      `group ${group} of the KV cache is "${kind}": its blocks do not stand for tokens of the prompt, and such blocks cannot be staged`,
      {
        hint: "serve this model on a platform that registers its memory directly",
        details: { group, kind },
      },
    );
  }
}

function isProduced({ kvTransferParams }: ConnectorRequest): boolean {
  return kvTransferParams?.["do_remote_decode"] === true;
}

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
