import {
  type BlockIds,
  type Clock,
  type ConnectorRequest,
  KvError,
  type KvTransferParams,
  type Random,
  type WorkerOutput,
} from "@kv/interface";
import { createBlockPool } from "./block-pool.js";
import { type EngineSides, registerCaches } from "./sides.js";

export interface EngineRequest {
  readonly requestId: string;
  readonly prompt: number;
  readonly numTokens: number;
  /** Of a local prefix hit. */
  readonly cachedTokens?: number;
  readonly cachedByGroup?: readonly number[] | undefined;
  /** It has other KV: of another adapter, cache salt or image. */
  readonly sameTokensAs?: number;
  /** Its token of this number is another one. */
  readonly changedToken?: number;
  /** The KV of the last one is never computed. */
  readonly outputTokens?: number;
  readonly params?: KvTransferParams;
}

export interface StepsOptions {
  readonly hostName: string;
  readonly engineId: string;
  readonly tpSize: number;
  readonly dcpSize?: number;
  readonly numBlocks: number;
  readonly blockOrder?: readonly number[];
  readonly stepMs?: number;
  /**
   * Prompts are computed in random chunks, left out of steps, and preempted. As from vLLM, the
   * workers hear only of those that take part.
   */
  readonly chunks?: Random;
  readonly receiveDeadlineMs?: number;
  /** A vLLM peer. */
  readonly plain?: boolean;
  /** Reports a prompt's first layer in the step before the last. */
  readonly reportsLayers?: boolean;
  readonly handsEqualTokens?: boolean;
  /** `isVerified`: its blocks may enter a prefix cache. */
  received?(requestId: string, isVerified: boolean): void;
  violation(what: string): void;
}

/** `createWorkerOutputAggregator` of `@kv/connector`, or the engine's own. */
export type CreateAggregator = (options: { readonly workers: number }) => {
  add(
    rank: { readonly tpRank: number; readonly ppRank: number },
    output: WorkerOutput,
  ): WorkerOutput;
  readonly size: number;
};

const MAX_CHUNK_TOKENS = 90;
/** To the end of a prompt's computation. */
const STEPS = 2;

interface Running extends ConnectorRequest, EngineRequest {
  readonly kind: "prefill" | "decode";
  readonly cachedTokens: number;
  blockIds: BlockIds;
  phase: "queued" | "computing" | "receiving" | "over";
  stepsLeft: number;
  receivingSinceMs: number;
  computedTokens: number;
  /** Prompt tokens whose KV was there, or came from a peer. */
  coveredTokens: number;
  /** Of these, the tokens that came from a peer. */
  externalTokens: number;
  recompute: boolean;
  resolve(params: KvTransferParams): void;
  reject(error: KvError): void;
}

/** Of D's output, all but the last. */
const tokensHeld = ({ numTokens, kind, outputTokens = 1 }: Running) =>
  kind === "decode" ? numTokens + outputTokens - 1 : numTokens;

const isFromPeer = ({ externalTokens, recompute }: Running) => externalTokens > 0 && !recompute;

/** `docs/architecture.md` defines a step. */
export function createSteps(
  options: StepsOptions,
  sides: EngineSides,
  clock: Clock,
  createAggregator: CreateAggregator,
) {
  const { hostName, engineId, stepMs = 2, chunks, violation } = options;
  const { receiveDeadlineMs = Number.POSITIVE_INFINITY } = options;
  const { scheduler, workers, ranks, cache } = sides;
  for (const worker of workers) worker.onProgress(wake);
  const aggregate = createAggregator({ workers: workers.length });
  const groups = cache.groups.map((each, group) => ({
    group,
    isState: each.kind === "mamba",
    isTransferred: each.enableKvTransfer !== false,
    windowTokens: each.slidingWindowTokens ?? Number.POSITIVE_INFINITY,
    blockTokens: (each.blockSize ?? cache.blockSize) * (options.dcpSize ?? 1),
    pool: createBlockPool(
      options.numBlocks,
      {
        allocated(blockId) {
          if (!ranks.poisoned(group, blockId))
            violation(
              `${hostName}: block ${blockId} of group ${group} was written to while nobody had it`,
            );
        },
        freed: (blockId) => ranks.poison(group, blockId),
      },
      options.blockOrder,
    ),
  }));
  const noBlocks: BlockIds = groups.map(() => []);
  /** That a D computes itself. */
  const ownTokens = groups.some(({ isState }) => isState) ? 1 : 0;
  const requests = new Map<string, Running>();
  /** The connector still needs them. */
  const kept = new Map<string, BlockIds>();
  /** The workers do not know it yet. */
  const endedSinceStep = new Set<string>();
  const queue: Running[] = [];
  let stepping = false;
  let alive = true;
  let asleep = false;
  const blocksOf = ({ isState, blockTokens }: (typeof groups)[number], numTokens: number) =>
    isState ? 1 : Math.ceil(numTokens / blockTokens);

  function allocate(numTokens: number): BlockIds | undefined {
    const taken: number[][] = [];
    for (const each of groups) {
      const ids = each.pool.allocate(blocksOf(each, numTokens));
      if (ids === undefined) {
        free(taken);
        return undefined;
      }
      taken.push(ids);
    }
    return taken;
  }

  function free(blockIds: BlockIds) {
    for (const [group, ids] of blockIds.entries()) groups[group]?.pool.free(ids);
  }

  function compute(
    { prompt, blockIds }: Running,
    from: number,
    until: number | ((group: number) => number),
    beforeLayer?: number,
  ): void {
    for (const [group, ids] of blockIds.entries()) {
      const end = typeof until === "number" ? until : until(group);
      ranks.compute({ prompt, group, blockIds: ids, from, until: end }, beforeLayer);
    }
  }

  function check(request: Running, isNew: boolean) {
    const { requestId, prompt, blockIds, coveredTokens, cachedTokens } = request;
    const until = isNew ? coveredTokens : tokensHeld(request);
    for (const { group, isTransferred, windowTokens, blockTokens } of groups) {
      const ids = blockIds[group] ?? [];
      const isReceived = isFromPeer(request);
      if (isReceived && !isTransferred) {
        const untouched = ids.slice(Math.ceil(cachedTokens / blockTokens));
        if (isNew && !untouched.every((id) => ranks.poisoned(group, id)))
          violation(
            `${hostName}: a peer wrote to group ${group} of ${requestId}, which has no part`,
          );
        continue;
      }
      const from = isReceived ? Math.max(0, coveredTokens - windowTokens + 1) : 0;
      const wrong = ranks.firstWrong({ prompt, group, blockIds: ids, from, until }, isNew);
      if (wrong !== undefined)
        violation(`${hostName}: request ${requestId} has wrong bytes: ${wrong}`);
    }
  }

  function wake() {
    if (stepping || !alive || asleep) return;
    stepping = true;
    clock.setTimer(
      () => {
        // It may have been stopped in the meantime, or have gone to sleep.
        if (alive && !asleep) void step();
        else stepping = false;
      },
      chunks === undefined ? stepMs : 1 + below(chunks, 3),
    );
  }

  function hasWork(): boolean {
    for (const { phase } of requests.values()) if (phase !== "receiving") return true;
    return scheduler.hasPendingWork();
  }

  async function step() {
    // Ends before the next step starts.
    stepping = sides.staged;
    for (const request of queue.splice(0))
      if (request.phase === "queued" && !admit(request)) queue.push(request);
    endedSinceStep.clear();
    const metadata = overTheWire(scheduler.buildStepMetadata());
    for (const worker of workers) worker.startLoad(metadata);
    const named = [...requests.values()].filter(isNamed);
    const ended = named.filter(advance);
    const computed: Record<string, number> = {};
    for (const { requestId, kind, computedTokens } of named)
      if (kind === "prefill") computed[requestId] = computedTokens;
    const saves = workers.map((worker) => worker.waitForSave(metadata, computed));
    if (!sides.staged) for (const save of saves) save.catch((error) => violation(String(error)));
    else {
      failUnsaved(await Promise.allSettled(saves));
      stepping = false;
      if (!alive) return;
    }
    for (const request of ended) if (request.phase !== "over") end(request, "length");
    collect();
    if (hasWork()) wake();
  }

  /** With `chunks`, leaves prompts out at random, and preempts some. */
  function isNamed(request: Running): boolean {
    if (chunks === undefined || request.kind === "decode") return true;
    if (request.phase !== "computing") return false;
    const chance = chunks.next();
    if (chance >= 0.3 && chance < 0.35) {
      free(request.blockIds);
      request.blockIds = noBlocks;
      request.phase = "queued";
      queue.push(request);
    }
    return chance >= 0.35;
  }

  /** Returns whether the request ended. */
  function advance(request: Running): boolean {
    if (request.phase !== "computing") return false;
    const { kind, numTokens, coveredTokens, recompute } = request;
    if (kind === "prefill" && chunks !== undefined) {
      const from = request.computedTokens;
      request.computedTokens = Math.min(numTokens, from + 1 + below(chunks, MAX_CHUNK_TOKENS));
      compute(request, from, request.computedTokens);
      return request.computedTokens === numTokens;
    }
    if (recompute && request.stepsLeft === STEPS) compute(request, 0, numTokens);
    request.stepsLeft -= 1;
    const isLast = request.stepsLeft === 0;
    if (kind === "prefill" && (isLast || sides.staged)) {
      request.computedTokens = isLast ? numTokens : Math.floor(numTokens / 2);
      compute(request, isFromPeer(request) ? coveredTokens : 0, request.computedTokens);
    }
    if (!isLast) {
      if (options.reportsLayers === true && kind === "prefill") computeFirstLayer(request);
      return false;
    }
    if (kind === "decode") compute(request, numTokens, tokensHeld(request));
    if (kind === "decode" || isFromPeer(request)) check(request, false);
    return true;
  }

  function computeFirstLayer(request: Running) {
    compute(request, 0, request.numTokens, 1);
    const computedTokens = { [request.requestId]: request.numTokens };
    for (const worker of workers.slice(0, options.tpSize))
      worker.layerComputed?.({ regions: ["layers.0"], computedTokens });
  }

  function collect() {
    for (const [index, worker] of workers.entries()) {
      const rank = { tpRank: index % options.tpSize, ppRank: Math.floor(index / options.tpSize) };
      apply(aggregate.add(rank, overTheWire(worker.collectFinished())));
    }
  }

  async function sleep() {
    asleep = true;
    const computing = [...requests.values()].filter(({ phase }) => phase !== "receiving");
    for (const request of computing) abandon(request, `engine ${engineId} goes to sleep`);
    await Promise.all(workers.map((worker) => worker.unregisterKvCaches?.()));
    collect();
    // Of those whose KV has just arrived, no step knows.
    for (const request of requests.values())
      if (request.phase === "computing") abandon(request, `engine ${engineId} goes to sleep`);
    const held = [...kept.keys()].filter((requestId) => !endedSinceStep.has(requestId));
    const receiving = [...requests.values()].filter(({ phase }) => phase !== "queued");
    if (receiving.length + held.length > 0)
      violation(
        `${hostName}: ${receiving.length} requests and ${held.length} kept ones while it sleeps`,
      );
  }

  function abandon(request: Running, reason: string) {
    const index = queue.indexOf(request);
    if (index >= 0) queue.splice(index, 1);
    end(request, "aborted");
    request.reject(new KvError("KV_REQUEST_ABORTED", reason));
  }

  async function wakeUp() {
    for (const { group } of groups)
      for (let block = 0; block < options.numBlocks; block++) ranks.poison(group, block);
    await registerCaches(sides);
    asleep = false;
    wake();
  }

  /** Before any peer is told that the blocks are ready. */
  function failUnsaved(outcomes: readonly PromiseSettledResult<void>[]) {
    for (const outcome of outcomes) {
      if (outcome.status === "fulfilled") continue;
      const error: unknown = outcome.reason;
      const failed = KvError.is(error, "KV_STAGING_FAILED")
        ? error.details?.["requestIds"]
        : undefined;
      if (!KvError.is(error) || !Array.isArray(failed)) {
        violation(`${hostName}: waitForSave failed with ${String(error)}`);
        continue;
      }
      for (const requestId of failed) {
        const request = requests.get(String(requestId));
        if (request === undefined) continue;
        end(request, "error");
        request.reject(error);
      }
    }
  }

  function admit(request: Running): boolean {
    const { numTokens, cachedTokens, cachedByGroup, kind } = request;
    let external = 0;
    try {
      const matched = scheduler.matchedTokens(request, cachedTokens, cachedByGroup);
      if (matched.wait === true) return false;
      external = matched.tokens;
    } catch (error) {
      end(request, "error");
      request.reject(KvError.from(error, "KV_INTERNAL", "matchedTokens"));
      return true;
    }
    const blockIds = allocate(tokensHeld(request));
    if (blockIds === undefined) return false;
    request.blockIds = blockIds;
    // At a full prefix hit, a real engine computes only the last token.
    if (external === 0 && (chunks === undefined || kind === "decode"))
      compute(request, 0, numTokens);
    else compute(request, 0, (group) => cachedByGroup?.[group] ?? cachedTokens);
    const ofPrompt = groups.map((each) =>
      blockIds[each.group]?.slice(0, blocksOf(each, numTokens)),
    );
    scheduler.afterAllocation(request, ofPrompt as BlockIds, external, cachedByGroup);
    request.externalTokens = external;
    request.phase = external > 0 ? "receiving" : "computing";
    request.receivingSinceMs = clock.now();
    request.stepsLeft = STEPS;
    if (chunks !== undefined) request.computedTokens = cachedTokens;
    request.coveredTokens = external > 0 ? cachedTokens + external : numTokens;
    const { remote_num_tokens: remoteTokens } = request.kvTransferParams ?? {};
    const expected = Math.min(
      kind === "decode" ? numTokens - ownTokens : numTokens,
      typeof remoteTokens === "number" ? remoteTokens : Infinity,
    );
    if (external > 0 && request.coveredTokens !== expected)
      violation(`${hostName}: ${external} tokens after ${cachedTokens} of ${numTokens}`);
    return true;
  }

  function end(request: Running, reason: "length" | "aborted" | "error") {
    request.phase = "over";
    requests.delete(request.requestId);
    const { requestId, blockIds } = request;
    endedSinceStep.add(requestId);
    const { prompt, sameTokensAs = prompt, numTokens, outputTokens = 1 } = request;
    const first = sameTokensAs * 1000 + numTokens;
    const outputTokenIds = Array.from({ length: outputTokens }, (_, at) => first + at);
    const computed = { numComputedTokens: tokensHeld(request), outputTokenIds };
    const finished = scheduler.requestFinished({ ...request, ...computed }, blockIds, reason);
    if (finished.keepBlocks) kept.set(requestId, blockIds);
    else free(blockIds);
    const { kv_peer, ...params } = finished.kvTransferParams ?? {};
    if (reason === "length") {
      request.resolve(overTheWire(options.plain === true ? params : { ...params, kv_peer }));
    }
  }

  function apply(output: WorkerOutput) {
    const failed = new Map(output.failedReceiving.map((failure) => [failure.requestId, failure]));
    for (const blockId of output.failedBlockIds) {
      if (!groups.some(({ pool }) => pool.isUsed(blockId)))
        violation(`${hostName}: failed block ${blockId} belongs to nobody`);
    }
    // In the same turn as its blocks are freed.
    scheduler.applyWorkerOutput(output);
    for (const requestId of [...output.finishedSending, ...output.finishedReceiving]) {
      free(kept.get(requestId) ?? []);
      kept.delete(requestId);
    }
    for (const requestId of output.finishedReceiving) {
      const request = requests.get(requestId);
      if (request?.phase !== "receiving") continue;
      const waitedMs = clock.now() - request.receivingSinceMs;
      if (waitedMs > receiveDeadlineMs)
        violation(`${hostName}: ${requestId} waited ${waitedMs} ms for its KV`);
      const failure = failed.get(requestId);
      if (failure === undefined) {
        options.received?.(requestId, output.unverifiedReceiving?.includes(requestId) !== true);
        check(request, true);
        if (chunks !== undefined) request.computedTokens = request.coveredTokens;
        if (chunks === undefined || request.kind === "decode")
          compute(request, request.coveredTokens, request.numTokens);
      } else if (scheduler.loadFailurePolicy === "recompute" && failure.blocksAtRisk !== true) {
        request.recompute = true;
      } else {
        end(request, "error");
        request.reject(new KvError(failure.code, failure.message));
        continue;
      }
      // Nothing may write to its blocks during the steps to come.
      request.phase = "computing";
      request.stepsLeft = STEPS;
    }
  }

  function submit(
    request: EngineRequest,
    kind: Running["kind"],
    kvTransferParams: KvTransferParams,
  ): Promise<KvTransferParams> {
    const { requestId } = request;
    const whole = { requestId, numPromptTokens: request.numTokens, kvTransferParams };
    return new Promise((resolve, reject) => {
      if (!alive) {
        reject(new KvError("KV_ENGINE_FAILED", `engine ${engineId} on ${hostName} is dead`));
        return;
      }
      const numTokens = scheduler.tokensToPrefill?.(whole) ?? request.numTokens;
      const running: Running = {
        cachedTokens: 0,
        ...request,
        ...whole,
        kind,
        numTokens,
        numPromptTokens: numTokens,
        ...(options.handsEqualTokens === true
          ? { promptTokenIds: new Array<number>(numTokens).fill(0) }
          : contentOf({ ...request, numTokens })),
        blockIds: noBlocks,
        phase: "queued",
        stepsLeft: 0,
        receivingSinceMs: 0,
        computedTokens: 0,
        coveredTokens: 0,
        externalTokens: 0,
        recompute: false,
        resolve,
        reject,
      };
      requests.set(requestId, running);
      queue.push(running);
      scheduler.requestQueued?.(running);
      wake();
    });
  }

  return {
    get alive() {
      return alive;
    },
    prefill: ({ params, ...request }: EngineRequest) =>
      submit(request, "prefill", {
        do_remote_decode: true,
        do_remote_prefill: false,
        remote_engine_id: null,
        remote_block_ids: null,
        remote_host: null,
        remote_port: null,
        ...params,
      }),
    decode: ({ params, ...request }: EngineRequest & { readonly params: KvTransferParams }) =>
      submit(request, "decode", params),
    abort(requestId: string): void {
      const request = requests.get(requestId);
      if (request === undefined) return;
      abandon(request, `request ${requestId} was aborted by its client`);
      wake();
    },
    outstanding(): Readonly<Record<string, number>> {
      const held: Record<string, number> = {
        blocks: groups.reduce((sum, { pool }) => sum + pool.used, 0),
        kept: kept.size,
        requests: requests.size,
        aggregating: aggregate.size,
      };
      const { listeners: _, ...rest } = scheduler.outstanding();
      for (const [name, count] of Object.entries(rest)) held[`scheduler.${name}`] = count;
      for (const [rank, worker] of workers.entries()) {
        for (const [name, count] of Object.entries(worker.outstanding()))
          held[`rank${rank}.${name}`] = count;
      }
      return held;
    },
    sleep,
    wakeUp,
    stop() {
      alive = false;
    },
    /** As by SIGKILL. */
    die() {
      alive = false;
      for (const request of requests.values()) {
        request.reject(
          new KvError("KV_ENGINE_FAILED", `engine ${engineId} on ${hostName} was killed`),
        );
      }
      requests.clear();
    },
  };
}

/** Prompts of one number begin alike. */
function contentOf({ prompt, numTokens, sameTokensAs = prompt, changedToken }: EngineRequest) {
  const promptTokenIds = Array.from(
    { length: numTokens },
    (_, token) => sameTokensAs * 1000 + token + (token === changedToken ? 500 : 0),
  );
  return sameTokensAs === prompt
    ? { promptTokenIds }
    : { promptTokenIds, contentKey: `adapter ${prompt}` };
}

const below = (random: Random, limit: number) => Math.floor(random.next() * limit);

/** The scheduler and the workers may run in different processes. */
function overTheWire<T>(value: T): T {
  return JSON.parse(JSON.stringify(value)) as T;
}
