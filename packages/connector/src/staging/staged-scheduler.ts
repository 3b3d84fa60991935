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
import { cacheKind, groupBlockTokens } from "@kv/plan";
import { peerTraceparent } from "@kv/protocol";
import { traceMember } from "../requests/remote-request.js";
import { createStagingPool } from "./staging-pool.js";
import type { StagedRequest, StagingOrders } from "./staging-step.js";

export interface StagedSchedulerOptions {
  readonly cache: KvCacheConfig;
  readonly poolBlocks: number;
}

/**
 * Scheduler side of a staged connector. Allocates pool blocks for requests; the inner connector
 * sees only those.
 * @throws `KV_PLATFORM_UNSUPPORTED` for groups whose blocks do not stand for tokens.
 */
export function stagedScheduler(
  inner: SchedulerConnector,
  { cache, poolBlocks }: StagedSchedulerOptions,
): SchedulerConnector {
  requireTokens(cache);
  const pool = createStagingPool(poolBlocks);
  /**
   * The tokens that D's requests had when the connector matched them: in all, and in each group.
   */
  const hits = new Map<string, { readonly tokens: number; readonly byGroup: readonly number[] }>();
  let saves: StagedRequest[] = [];
  let saved: string[] = [];
  let loads: StagedRequest[] = [];
  let over: string[] = [];

  const blockTokens = groupBlockTokens(cache);
  /**
   * Of each group, the blocks that hold the tokens from its own `from` to `until`: the index of the
   * first, and the end.
   */
  const spansOf = (from: readonly number[], until: number): readonly Span[] =>
    blockTokens.map((tokens, group) =>
      cache.groups[group]?.enableKvTransfer === false
        ? [0, 0]
        : [Math.floor((from[group] ?? 0) / tokens), Math.ceil(until / tokens)],
    );

  function release(requestId: string): void {
    hits.delete(requestId);
    saves = saves.filter((save) => save.requestId !== requestId);
    loads = loads.filter((load) => load.requestId !== requestId);
    if (pool.of(requestId) !== undefined) over.push(requestId);
    pool.free(requestId);
  }

  /**
   * Takes the request's pool blocks, or has the engine wait: a request waits before it has device
   * blocks, and then within its timeout.
   */
  function orWait(
    matched: MatchedTokens,
    requestId: string,
    spans: readonly Span[],
  ): MatchedTokens {
    const wire = pool.take(requestId, countsOf(spans));
    return wire === undefined ? { ...matched, wait: true } : matched;
  }

  function produce(request: ConnectorRequest, blockIds: BlockIds): void {
    const { requestId, numPromptTokens } = request;
    const spans = spansOf([], numPromptTokens);
    const wire = pool.take(requestId, countsOf(spans));
    // The engine does not support `wait`. Refuse the request: there is no pool block for what it
    // would compute.
    if (wire === undefined) throw notAdmitted(requestId);
    const device = within(blockIds, spans);
    saves = saves.filter((save) => save.requestId !== requestId);
    saves.push({
      requestId,
      numTokens: numPromptTokens,
      ...traceMember(traceparentOf(request)),
      ...paired(requestId, device, wire),
    });
    inner.afterAllocation(request, wire, 0);
  }

  function consume(request: ConnectorRequest, blockIds: BlockIds, externalTokens: number): void {
    const { requestId } = request;
    const { tokens, byGroup } = hits.get(requestId) ?? {
      tokens: 0,
      byGroup: blockTokens.map(() => 0),
    };
    const numTokens = tokens + externalTokens;
    const spans = spansOf(byGroup, numTokens);
    const device = within(blockIds, spans);
    const wire = pool.take(requestId, countsOf(spans));
    if (wire === undefined) throw notAdmitted(requestId);
    loads.push({
      requestId,
      numTokens,
      ...traceMember(traceparentOf(request)),
      ...paired(requestId, device, wire),
    });
    inner.afterAllocation(request, inPlace(wire, spans), externalTokens, byGroup);
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
    cacheHitSource: (request) => inner.cacheHitSource?.(request) ?? "external_unspecified",
    firstToken: (request) => inner.firstToken?.(request),
    tokensToPrefill: (request) => inner.tokensToPrefill?.(request) ?? request.numPromptTokens,
    matchedTokens(request, numComputedTokens, computedTokens) {
      const { requestId, numPromptTokens } = request;
      const matched = inner.matchedTokens(request, numComputedTokens, computedTokens);
      if (matched.wait === true) return matched;
      if (matched.tokens > 0) {
        // The engine's prefix cache has changed since the request began to wait: it needs another
        // number of blocks.
        const byGroup = computedTokens ?? blockTokens.map(() => numComputedTokens);
        if (hits.get(requestId)?.byGroup.join() !== byGroup.join()) pool.free(requestId);
        hits.set(requestId, { tokens: numComputedTokens, byGroup });
        return orWait(matched, requestId, spansOf(byGroup, numComputedTokens + matched.tokens));
      }
      return isProduced(request)
        ? orWait(matched, requestId, spansOf([], numPromptTokens))
        : matched;
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
      for (const requestId of output.finishedReceiving)
        if (!atRisk.has(requestId)) release(requestId);
    },
    hasPendingWork: () => saves.length + loads.length + over.length > 0 || inner.hasPendingWork(),
    outstanding: () => ({
      ...inner.outstanding(),
      stagedBlocks: pool.held,
      stagingWaits: pool.waiting,
    }),
    async close() {
      pool.clear();
      await inner.close();
    },
  };
}

/** Index of the first block, and the end, in a list of blocks by position in the prompt. */
type Span = readonly [first: number, end: number];

const countsOf = (spans: readonly Span[]): readonly number[] =>
  spans.map(([first, end]) => end - first);

const within = (blockIds: BlockIds, spans: readonly Span[]): BlockIds =>
  blockIds.map((ids, group) => ids.slice(...(spans[group] ?? [0, 0])));

/**
 * Pool blocks in place of the prompt's blocks, from the begin of each span; block 0 fills the
 * places before.
 */
function inPlace(wire: BlockIds, spans: readonly Span[]): BlockIds {
  return wire.map((ids, group) => [...new Array<number>(spans[group]?.[0] ?? 0).fill(0), ...ids]);
}

/** The pool's blocks are taken by tokens, before the engine has allocated any of its own. */
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
 * Each pool block with its device block.
 * @throws `KV_STAGING_FAILED` where the engine has not allocated all blocks: the others would never
 * be copied.
 */
function paired(requestId: string, device: BlockIds, wire: BlockIds): StagedBlocks {
  for (const [group, ids] of wire.entries()) {
    const given = device[group]?.length ?? 0;
    if (given === ids.length) continue;
    throw new KvError(
      "KV_STAGING_FAILED",
      `request ${requestId} was admitted with ${given} blocks of KV cache group ${group}, and its tokens need ${ids.length}`,
      {
        hint: "allocate the blocks of the whole prompt when the request is admitted",
        details: { group, given, needed: ids.length },
      },
    );
  }
  return { device, wire };
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
