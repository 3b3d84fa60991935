import { createWorkerOutputAggregator } from "@kv/connector";
import { KvError, type KvTransferParams, type WorkerOutput } from "@kv/interface";
import type { MemoryHost } from "@kv/transport-memory";
import { createBlockPool } from "./block-pool.js";
import { createSimCompute, PREFILL_STEPS, type Running, tokensHeld } from "./sim-compute.js";
import type { SimEngine, SimEngineOptions, SimRequest } from "./sim-options.js";
import { registerCaches, type SimSides } from "./sim-sides.js";

/**
 * Runs the steps of a simulated engine and the requests in them. `docs/architecture.md` defines a
 * step.
 */
export interface SimSteps
  extends Pick<
    SimEngine,
    "alive" | "prefill" | "decode" | "abort" | "sleep" | "wakeUp" | "outstanding"
  > {
  /** No new step starts after this call. */
  stop(): void;
}

export function createSimSteps(
  options: SimEngineOptions,
  sides: SimSides,
  host: MemoryHost,
): SimSteps {
  const { hostName, engineId, stepMs = 2, violation } = options;
  const blockTokens = options.blockSize * (options.dcpSize ?? 1);
  const { receiveDeadlineMs = Number.POSITIVE_INFINITY } = options;
  const { scheduler, workers, ranks } = sides;
  const { clock } = host;
  const compute = createSimCompute(options, sides);
  for (const worker of workers) worker.onProgress(wake);
  const aggregate = createWorkerOutputAggregator({ workers: workers.length });
  const pool = createBlockPool(
    options.numBlocks,
    {
      allocated(blockId) {
        if (!ranks.poisoned(blockId))
          violation(`${hostName}: block ${blockId} was written to while nobody had it`);
      },
      freed: (blockId) => ranks.poison(blockId),
    },
    options.blockOrder,
  );
  const requests = new Map<string, Running>();
  /** Blocks that the connector still needs after their requests ended in the engine. */
  const kept = new Map<string, number[]>();
  /** Requests that have ended since the last step: the workers do not know it yet. */
  const endedSinceStep = new Set<string>();
  const queue: Running[] = [];
  let stepping = false;
  let alive = true;
  let asleep = false;
  host.onKill(() => {
    alive = false;
    for (const request of requests.values()) {
      request.reject(
        new KvError("KV_ENGINE_FAILED", `engine ${engineId} on ${hostName} was killed`),
      );
    }
    requests.clear();
  });

  function wake(): void {
    if (stepping || !alive || asleep) return;
    stepping = true;
    clock.setTimer(() => {
      // The engine may have been stopped in the meantime, or have gone to sleep.
      if (alive && !asleep) void step();
      else stepping = false;
    }, stepMs);
  }

  function hasWork(): boolean {
    for (const { phase } of requests.values()) if (phase !== "receiving") return true;
    return scheduler.hasPendingWork();
  }

  async function step(): Promise<void> {
    // If this step waits for saves, the next step must not start before this one ends.
    stepping = sides.staged;
    for (const request of queue.splice(0))
      if (request.phase === "queued" && !admit(request)) queue.push(request);
    endedSinceStep.clear();
    const metadata = overTheWire(scheduler.buildStepMetadata());
    for (const worker of workers) worker.startLoad(metadata);
    const ended = [...requests.values()].filter(compute.step);
    const computed: Record<string, number> = {};
    for (const { requestId, kind, computedTokens } of requests.values())
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

  function collect(): void {
    for (const [index, worker] of workers.entries()) {
      const rank = { tpRank: index % options.tpSize, ppRank: Math.floor(index / options.tpSize) };
      apply(aggregate.add(rank, overTheWire(worker.collectFinished())));
    }
  }

  async function sleep(): Promise<void> {
    asleep = true;
    queue.splice(0);
    for (const request of [...requests.values()]) {
      if (request.phase === "receiving") continue;
      end(request, "aborted");
      request.reject(new KvError("KV_REQUEST_ABORTED", `engine ${engineId} goes to sleep`));
    }
    await Promise.all(workers.map((worker) => worker.unregisterKvCaches?.()));
    collect();
    const held = [...kept.keys()].filter((requestId) => !endedSinceStep.has(requestId));
    if (requests.size + held.length > 0)
      violation(
        `${hostName}: ${requests.size} requests and ${held.length} kept ones while it sleeps`,
      );
  }

  async function wakeUp(): Promise<void> {
    for (let block = 0; block < options.numBlocks; block++) ranks.poison(block);
    await registerCaches(sides);
    asleep = false;
    wake();
  }

  /**
   * Ends each request whose blocks could not be saved, before any peer is told that the blocks are
   * ready.
   */
  function failUnsaved(outcomes: readonly PromiseSettledResult<void>[]): void {
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

  /**
   * Returns false when the request cannot start now: the connector asks to wait, or there are not
   * enough free blocks.
   */
  function admit(request: Running): boolean {
    let external = 0;
    try {
      const matched = scheduler.matchedTokens(request, request.cachedTokens);
      if (matched.wait === true) return false;
      external = matched.tokens;
    } catch (error) {
      end(request, "error");
      request.reject(KvError.from(error, "KV_INTERNAL", "matchedTokens"));
      return true;
    }
    const blockIds = pool.allocate(Math.ceil(tokensHeld(request) / blockTokens));
    if (blockIds === undefined) return false;
    request.blockIds = blockIds;
    // Writes the tokens that no peer sends. At a full prefix hit, a real engine computes only the
    // last token.
    ranks.compute(
      request.prompt,
      blockIds,
      0,
      external === 0 ? request.numTokens : request.cachedTokens,
    );
    const ofPrompt = blockIds.slice(0, Math.ceil(request.numTokens / blockTokens));
    scheduler.afterAllocation(request, [ofPrompt], external);
    request.externalTokens = external;
    request.phase = external > 0 ? "receiving" : "computing";
    request.receivingSinceMs = clock.now();
    request.stepsLeft = PREFILL_STEPS;
    request.coveredTokens = external > 0 ? request.cachedTokens + external : request.numTokens;
    const { remote_num_tokens: remoteTokens } = request.kvTransferParams ?? {};
    const expected = Math.min(
      request.numTokens,
      typeof remoteTokens === "number" ? remoteTokens : Infinity,
    );
    if (external > 0 && request.coveredTokens !== expected) {
      violation(
        `${hostName}: ${external} tokens after ${request.cachedTokens} of ${request.numTokens}`,
      );
    }
    return true;
  }

  function end(request: Running, reason: "length" | "aborted" | "error"): void {
    request.phase = "over";
    requests.delete(request.requestId);
    const { requestId, blockIds } = request;
    endedSinceStep.add(requestId);
    const { prompt, sameTokensAs = prompt, numTokens, outputTokens = 1 } = request;
    const first = sameTokensAs * 1000 + numTokens;
    const outputTokenIds = Array.from({ length: outputTokens }, (_, at) => first + at);
    const computed = { numComputedTokens: tokensHeld(request), outputTokenIds };
    const finished = scheduler.requestFinished({ ...request, ...computed }, [blockIds], reason);
    if (finished.keepBlocks) kept.set(requestId, blockIds);
    else pool.free(blockIds);
    const { kv_peer, ...params } = finished.kvTransferParams ?? {};
    if (reason === "length") {
      request.resolve(overTheWire(options.plain === true ? params : { ...params, kv_peer }));
    }
  }

  function apply(output: WorkerOutput): void {
    const failed = new Map(output.failedReceiving.map((failure) => [failure.requestId, failure]));
    for (const blockId of output.failedBlockIds) {
      if (!pool.isUsed(blockId))
        violation(`${hostName}: failed block ${blockId} belongs to nobody`);
    }
    // Free the blocks in the same turn in which the scheduler connector learns of it: until then it
    // reports them as held.
    scheduler.applyWorkerOutput(output);
    for (const requestId of [...output.finishedSending, ...output.finishedReceiving]) {
      const blockIds = kept.get(requestId);
      if (blockIds === undefined) continue;
      kept.delete(requestId);
      pool.free(blockIds);
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
        compute.check(request, true);
        ranks.compute(request.prompt, request.blockIds, request.coveredTokens, request.numTokens);
        // The request now decodes. Nothing may write to its blocks during these steps.
        request.phase = "computing";
        request.stepsLeft = PREFILL_STEPS;
      } else if (scheduler.loadFailurePolicy === "recompute" && failure.blocksAtRisk !== true) {
        request.recompute = true;
        request.phase = "computing";
        request.stepsLeft = PREFILL_STEPS;
      } else {
        end(request, "error");
        request.reject(new KvError(failure.code, failure.message));
      }
    }
  }

  function submit(
    request: SimRequest,
    kind: Running["kind"],
    params: KvTransferParams,
    cachedTokens: number,
  ): Promise<KvTransferParams> {
    return new Promise((resolve, reject) => {
      if (!alive) {
        reject(new KvError("KV_ENGINE_FAILED", `engine ${engineId} on ${hostName} is dead`));
        return;
      }
      const running: Running = {
        ...request,
        kind,
        numPromptTokens: request.numTokens,
        ...(options.handsEqualTokens === true
          ? { promptTokenIds: new Array<number>(request.numTokens).fill(0) }
          : contentOf(request)),
        kvTransferParams: params,
        cachedTokens,
        blockIds: [],
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
      requests.set(request.requestId, running);
      queue.push(running);
      scheduler.requestQueued?.(running);
      wake();
    });
  }

  return {
    get alive() {
      return alive;
    },
    prefill: ({ cachedTokens = 0, ...request }) =>
      submit(
        request,
        "prefill",
        {
          do_remote_decode: true,
          do_remote_prefill: false,
          remote_engine_id: null,
          remote_block_ids: null,
          remote_host: null,
          remote_port: null,
          ...request.params,
        },
        cachedTokens,
      ),
    decode: ({ params, cachedTokens = 0, ...request }) =>
      submit(request, "decode", params, cachedTokens),
    abort(requestId) {
      const request = requests.get(requestId);
      if (request === undefined) return;
      const index = queue.indexOf(request);
      if (index >= 0) queue.splice(index, 1);
      end(request, "aborted");
      request.reject(
        new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted by its client`),
      );
      wake();
    },
    outstanding() {
      const held: Record<string, number> = {
        blocks: pool.used,
        kept: kept.size,
        requests: requests.size,
      };
      held.aggregating = aggregate.size;
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
  };
}

/**
 * The tokens of a simulated prompt, and what else decides its KV. Prompts of one number begin
 * alike.
 */
function contentOf({ prompt, numTokens, sameTokensAs = prompt, changedToken }: SimRequest) {
  const promptTokenIds = Array.from(
    { length: numTokens },
    (_, token) => sameTokensAs * 1000 + token + (token === changedToken ? 500 : 0),
  );
  return sameTokensAs === prompt
    ? { promptTokenIds }
    : { promptTokenIds, contentKey: `adapter ${prompt}` };
}

/**
 * The scheduler and workers of a connector may run in different processes, so the values between
 * them are converted to JSON and back.
 */
export function overTheWire<T>(value: T): T {
  return JSON.parse(JSON.stringify(value)) as T;
}
