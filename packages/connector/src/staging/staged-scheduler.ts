import {
  type BlockIds,
  type ConnectorRequest,
  type KvCacheConfig,
  KvError,
  type MatchedTokens,
  type SchedulerConnector,
  type StagedBlocks,
  type StepMetadata,
} from "@kv/interface";
import { peerTraceparent } from "@kv/protocol";
import { traceMember } from "../tracing/spans.js";
import { createStagingPool } from "./staging-pool.js";
import type { StagedRequest, StagingOrders } from "./staging-step.js";

export interface StagedSchedulerOptions {
  readonly cache: KvCacheConfig;
  readonly poolBlocks: number;
}

/** Scheduler side of a staged connector. Allocates pool blocks for requests; the inner connector sees only those. */
export function stagedScheduler(
  inner: SchedulerConnector,
  { cache, poolBlocks }: StagedSchedulerOptions,
): SchedulerConnector {
  const pool = createStagingPool(poolBlocks);
  const computedTokens = new Map<string, number>();
  let saves: StagedRequest[] = [];
  let saved: string[] = [];
  let loads: StagedRequest[] = [];
  let over: string[] = [];

  const blocksOf = (tokens: number) => Math.ceil(tokens / cache.blockSize);
  const perGroup = (count: number) => cache.groups.map(() => Math.max(0, count));

  function release(requestId: string): void {
    computedTokens.delete(requestId);
    saves = saves.filter((save) => save.requestId !== requestId);
    loads = loads.filter((load) => load.requestId !== requestId);
    if (pool.of(requestId) !== undefined) over.push(requestId);
    pool.free(requestId);
  }

  /** Pool blocks in place of the prompt's blocks, starting at index `skipped`; block 0 fills the places before. */
  function inPlace(wire: BlockIds, skipped: number): BlockIds {
    return wire.map((ids) => [...new Array<number>(skipped).fill(0), ...ids]);
  }

  /** Takes the request's pool blocks, or has the engine wait: a request waits before it has device blocks, and then within its timeout. */
  function orWait(matched: MatchedTokens, requestId: string, blocks: number): MatchedTokens {
    const wire = pool.take(requestId, perGroup(blocks));
    return wire === undefined ? { ...matched, wait: true } : matched;
  }

  function produce(request: ConnectorRequest, blockIds: BlockIds): void {
    const { requestId, numPromptTokens } = request;
    const count = blocksOf(numPromptTokens);
    const wire = pool.take(requestId, perGroup(count));
    // The engine does not support `wait`. Refuse the request: there is no pool block for what it would compute.
    if (wire === undefined) throw notAdmitted(requestId);
    const device = blockIds.map((ids) => ids.slice(0, count));
    saves = saves.filter((save) => save.requestId !== requestId);
    saves.push({
      requestId,
      numTokens: numPromptTokens,
      ...traceMember(traceparentOf(request)),
      ...paired(device, wire),
    });
    inner.afterAllocation(request, wire, 0);
  }

  function consume(request: ConnectorRequest, blockIds: BlockIds, externalTokens: number): void {
    const { requestId } = request;
    const computed = computedTokens.get(requestId) ?? 0;
    const numTokens = computed + externalTokens;
    const skipped = Math.floor(computed / cache.blockSize);
    const end = blocksOf(numTokens);
    const device = blockIds.map((ids) => ids.slice(skipped, end));
    const wire = pool.take(requestId, perGroup(end - skipped));
    if (wire === undefined) throw notAdmitted(requestId);
    loads.push({ requestId, numTokens, ...traceMember(traceparentOf(request)), ...paired(device, wire) });
    inner.afterAllocation(request, inPlace(wire, skipped), externalTokens);
  }

  function takeOrders(): { readonly staging: StagingOrders } | undefined {
    if (saves.length + saved.length + loads.length + over.length === 0) return undefined;
    const staging = { saves, saved, loads, over };
    saves = [];
    saved = [];
    loads = [];
    over = [];
    return { staging };
  }

  return {
    name: inner.name,
    loadFailurePolicy: inner.loadFailurePolicy,
    setHandshakeMetadata: (workers) => inner.setHandshakeMetadata(workers),
    requestQueued: (request) => inner.requestQueued?.(request),
    matchedTokens(request, numComputedTokens) {
      const { requestId, numPromptTokens } = request;
      const matched = inner.matchedTokens(request, numComputedTokens);
      if (matched.wait === true) return matched;
      if (matched.tokens > 0) {
        // The engine's prefix cache has changed since the request began to wait: it needs another number of blocks.
        if (computedTokens.get(requestId) !== numComputedTokens) pool.free(requestId);
        computedTokens.set(requestId, numComputedTokens);
        const skipped = Math.floor(numComputedTokens / cache.blockSize);
        return orWait(matched, requestId, blocksOf(numComputedTokens + matched.tokens) - skipped);
      }
      return isProduced(request) ? orWait(matched, requestId, blocksOf(numPromptTokens)) : matched;
    },
    afterAllocation(request, blockIds, externalTokens) {
      if (externalTokens > 0) consume(request, blockIds, externalTokens);
      else if (isProduced(request)) produce(request, blockIds);
      else inner.afterAllocation(request, blockIds, externalTokens);
    },
    buildStepMetadata(): StepMetadata {
      return { ...inner.buildStepMetadata(), ...takeOrders() };
    },
    requestFinished(request, blockIds, reason) {
      const { requestId } = request;
      const wire = pool.of(requestId) ?? blockIds.map(() => []);
      const finished = inner.requestFinished(request, wire, reason);
      if (!finished.keepBlocks) release(requestId);
      else if (isProduced(request)) saved.push(requestId);
      return finished;
    },
    applyWorkerOutput(output) {
      const atRisk = new Set(
        output.failedReceiving.flatMap(({ requestId, blocksAtRisk }) =>
          blocksAtRisk === true ? [requestId] : [],
        ),
      );
      inner.applyWorkerOutput(output);
      for (const requestId of output.finishedSending) release(requestId);
      for (const requestId of output.finishedReceiving) if (!atRisk.has(requestId)) release(requestId);
    },
    hasPendingWork: () => saves.length + loads.length + over.length > 0 || inner.hasPendingWork(),
    outstanding: () => ({ ...inner.outstanding(), stagedBlocks: pool.held, stagingWaits: pool.waiting }),
    async close() {
      pool.clear();
      await inner.close();
    },
  };
}

function isProduced({ kvTransferParams }: ConnectorRequest): boolean {
  return kvTransferParams?.["do_remote_decode"] === true;
}

/** Both lists get the same length. An engine may allocate fewer blocks than the tokens need only where none of them is read. */
function paired(device: BlockIds, wire: BlockIds): StagedBlocks {
  return {
    device,
    wire: device.map((ids, group) => (wire[group] ?? []).slice(0, ids.length)),
  };
}

/** The engine's context, else that of an `@kv` P. */
function traceparentOf({ traceparent, kvTransferParams }: ConnectorRequest): string | undefined {
  return traceparent ?? peerTraceparent(kvTransferParams);
}

function notAdmitted(requestId: string): KvError {
  return new KvError(
    "KV_STAGING_FAILED",
    `request ${requestId} was admitted while the staging pool has no room for it`,
    { hint: "leave a request in the queue while matchedTokens returns wait" },
  );
}
