import { createWorkerOutputAggregator } from "@kv/connector";
import {
  type Ambient,
  type AmbientOptions,
  ambient,
  KvError,
  type KvTransferParams,
  type SchedulerConnector,
  type StepMetadata,
  type Timer,
  type WorkerConnector,
} from "@kv/interface";
import type { BlockPool } from "./cache/block-pool.js";
import type { CacheTier } from "./cache/cache-tier.js";
import type { KvPool } from "./cache/kv-pool.js";
import type { EngineModel } from "./engine-model.js";
import { ModelRunner } from "./model-runner.js";
import { checkRequest, type EngineHandle, type EngineRequest, RequestRecord } from "./request.js";
import { type Chunk, type EngineHooks, Scheduler } from "./scheduler.js";
import { SleepMode } from "./sleep-mode.js";

export interface EngineOptions extends AmbientOptions {
  readonly model: EngineModel;
  readonly pool: KvPool;
  readonly blocks: BlockPool;
  /** Default: an engine on its own, which neither sends nor receives KV. */
  readonly connector?:
    | { readonly scheduler: SchedulerConnector; readonly workers: readonly WorkerConnector[] }
    | undefined;
  readonly hooks?: EngineHooks | undefined;
  /** Brings what a request's `remote_kv_source` has. Default: such a request computes its prompt. */
  readonly tier?: CacheTier | undefined;
  readonly maxNumSeqs?: number | undefined;
  readonly maxConcurrentBatches?: number | undefined;
  /** A longer prompt is computed in chunks, one in each step. Default: no limit. */
  readonly maxNumBatchedTokens?: number | undefined;
  readonly reportLayers?: boolean | undefined;
  readonly maxModelLen?: number | undefined;
  readonly prefixCaching?: boolean | undefined;
}

const PENDING_WORK_PAUSE_MS = 1;
/** They wait for a handshake with an address that the request names. */
const MAX_PENDING_RELEASES = 1024;

/**
 * A small paged engine with continuous batching. Each turn of its loop is one engine step in the
 * order that `connector.ts` of `@kv/interface` defines.
 */
export class Engine {
  readonly sleepMode: SleepMode;
  readonly #options: EngineOptions;
  readonly #ambient: Ambient;
  readonly #scheduler: Scheduler;
  readonly #runner: ModelRunner;
  readonly #connector: SchedulerConnector | undefined;
  readonly #workers: readonly WorkerConnector[];
  readonly #aggregator: ReturnType<typeof createWorkerOutputAggregator>;
  readonly #wakeup = new Wakeup();
  readonly #idleWaiters: (() => void)[] = [];
  readonly #loop: Promise<void>;
  readonly #batches = new Set<Promise<void>>();
  #batchFailure: { readonly error: unknown } | undefined;
  #closing: Promise<void> | undefined;
  #pendingWorkTimer: Timer | undefined;
  /** The last step asked for another one only because of the connector's pending work. */
  #steppedForWork = false;

  constructor(options: EngineOptions) {
    const {
      model,
      pool,
      blocks,
      connector,
      hooks = {},
      maxNumSeqs = 64,
      reportLayers = false,
    } = options;
    this.#options = options;
    this.#ambient = ambient(options);
    this.#connector = connector?.scheduler;
    this.#workers = connector?.workers ?? [];
    this.#scheduler = new Scheduler({
      blocks,
      blockSize: pool.config.blockSize,
      connector: this.#connector,
      hooks,
      maxNumSeqs,
      ambient: this.#ambient,
      vocabSize: model.config.vocabSize,
      emit: (record, token) => this.#emit(record, token),
    });
    const { clock } = this.#ambient;
    this.#runner = new ModelRunner({ model, pool, clock, workers: this.#workers, reportLayers });
    this.#aggregator = createWorkerOutputAggregator({ workers: this.#workers.length });
    this.sleepMode = new SleepMode({
      connector: this.#connector,
      workers: this.#workers,
      aggregator: this.#aggregator,
      scheduler: this.#scheduler,
      pool,
      blocks,
      wakeLoop: () => this.#wakeup.wake(),
    });
    for (const worker of this.#workers) worker.onProgress(() => this.#wakeup.wake());
    this.#loop = this.#run();
  }

  /**
   * Queues a request.
   * @throws Those of `checkRequest`; `KV_REQUEST_INVALID` for an id that is in use;
   * `KV_ENGINE_FAILED` after `close`.
   */
  submit(given: EngineRequest): EngineHandle {
    const { model, pool, blocks, tier, prefixCaching = true } = this.#options;
    const request = this.#shortened(given);
    const { requestId } = request;
    const { blockSize } = pool.config;
    if (this.#closing !== undefined)
      throw new KvError("KV_ENGINE_FAILED", `request ${requestId}: the engine is shutting down`);
    this.sleepMode.requireAwake(requestId);
    if (this.#scheduler.has(requestId))
      throw new KvError("KV_REQUEST_INVALID", `request ${requestId}: another request has this id`);
    const { maxModelLen = model.config.maxModelLen } = this.#options;
    checkRequest(request, { ...model.config, maxModelLen, blockSize, capacity: blocks.capacity });
    const source = tier?.sourceOf(request.kvTransferParams);
    const uniform = this.#ambient.random.next;
    const record = new RequestRecord(request, {
      blockSize,
      uniform,
      prefixCaching,
      tracer: this.#ambient.tracer,
    });
    this.#scheduler.add(record);
    if (tier !== undefined && source !== undefined) void this.#fetch(record, tier, source);
    this.#wakeup.wake();
    return {
      requestId,
      done: record.done,
      abort: (reason = "the client disconnected") => this.#abort(record, reason),
    };
  }

  /**
   * Has the prefill instance that `kvTransferParams` name free the blocks of a refused request, as
   * vLLM does. When too many notifications are pending, or the parameters cannot be read, they are
   * held until their lease ends.
   */
  releaseRemote(requestId: string, kvTransferParams: KvTransferParams): void {
    const { log } = this.#ambient;
    if (kvTransferParams.do_remote_prefill !== true || this.#closing !== undefined) return;
    const pending = this.#workers.map((worker) => worker.outstanding().notifications ?? 0);
    if (Math.max(0, ...pending) > MAX_PENDING_RELEASES) {
      log.warn("blocks-not-released", { requestId, pending: Math.max(...pending) });
      return;
    }
    try {
      const request = { requestId, numPromptTokens: 1, kvTransferParams };
      this.#connector?.requestFinished(request, [[]], "aborted");
    } catch (error) {
      log.warn("blocks-not-released", { requestId, error: String(error) });
    }
    this.#wakeup.wake();
  }

  /** Before the admission, which then finds the blocks in the cache. */
  async #fetch(record: RequestRecord, tier: CacheTier, source: string): Promise<void> {
    const { blockSize } = this.#options.pool.config;
    const { hashes, request } = record;
    const { promptTokens: tokens } = request;
    record.fetch = new AbortController();
    try {
      // The logits of the last token are needed.
      const prefix = {
        hashes: hashes.slice(0, Math.floor((tokens.length - 1) / blockSize)),
        tokens,
      };
      const blocks = await tier.fetch(source, prefix, record.fetch.signal);
      record.fetchedTokens = blocks * blockSize;
    } catch (error) {
      this.#ambient.log.warn("kv-not-fetched", { source, error });
    } finally {
      record.fetch = undefined;
      this.#wakeup.wake();
    }
  }

  /** A prefill may have to leave the last tokens of its prompt to the decode engine. */
  #shortened(request: EngineRequest): EngineRequest {
    const { requestId, promptTokens, kvTransferParams } = request;
    const numPromptTokens = promptTokens.length;
    const numTokens = this.#connector?.tokensToPrefill?.({
      requestId,
      numPromptTokens,
      kvTransferParams,
    });
    if (numTokens === undefined || numTokens >= numPromptTokens) return request;
    return { ...request, promptTokens: promptTokens.slice(0, numTokens), maxTokens: 1 };
  }

  #abort(record: RequestRecord, reason: string): void {
    const { requestId } = record.request;
    if (!this.#scheduler.isAlive(requestId)) return;
    record.end(
      "aborted",
      new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted: ${reason}`),
    );
    this.#wakeup.wake();
  }

  async #run(): Promise<void> {
    while (this.#closing === undefined || this.#scheduler.requests.length > 0) {
      await this.#wakeup.sleep();
      if (this.sleepMode.isAsleep) continue;
      await this.#safeStep();
      await this.sleepMode.betweenSteps(() => this.#step());
    }
  }

  /** Runs a step; when it fails, every request fails with the same error. */
  async #safeStep(): Promise<void> {
    try {
      await this.#step();
    } catch (error) {
      const failure = KvError.from(error, "KV_ENGINE_FAILED", "an engine step failed");
      this.#ambient.log.error("engine-step-failed", {
        code: failure.code,
        message: failure.message,
      });
      for (const record of this.#scheduler.requests) record.end("error", failure);
      await this.#finishEnded();
    }
    if (this.#scheduler.isIdle) this.#resolveIdle();
  }

  async #step(): Promise<void> {
    const scheduler = this.#scheduler;
    scheduler.admitWaiting();
    const metadata = this.#connector?.buildStepMetadata();
    if (metadata !== undefined) {
      for (const record of scheduler.inState("remote")) record.announced = true;
      for (const worker of this.#workers) worker.startLoad(metadata);
    }
    await this.#compute(metadata);
    const outputs = this.#workers.map((worker, tpRank) =>
      this.#aggregator.add({ tpRank }, worker.collectFinished()),
    );
    await this.#finishEnded();
    for (const output of outputs)
      if (await scheduler.applyWorkerOutput(output)) this.#wakeup.wake();
    this.#scheduleNextStep();
  }

  /**
   * Starts a batch with the requests that are in no other one. Returns when there is room for a
   * further batch. Throws why a batch failed.
   */
  async #compute(metadata: StepMetadata | undefined): Promise<void> {
    const { maxConcurrentBatches = 1, maxNumBatchedTokens } = this.#options;
    const chunks = this.#scheduler.nextBatch(maxNumBatchedTokens);
    if (chunks.length === 0) {
      if (metadata !== undefined) await this.#waitForSave(metadata);
    } else {
      const batch = this.#runBatch(chunks, metadata)
        .catch((error: unknown) => {
          this.#batchFailure ??= { error };
        })
        .finally(() => {
          this.#batches.delete(batch);
          this.#wakeup.wake();
        });
      this.#batches.add(batch);
      if (this.#batches.size >= maxConcurrentBatches) await Promise.race(this.#batches);
    }
    const failure = this.#batchFailure;
    this.#batchFailure = undefined;
    if (failure !== undefined) throw failure.error;
  }

  async #runBatch(chunks: readonly Chunk[], metadata: StepMetadata | undefined): Promise<void> {
    try {
      await Promise.all(chunks.map((chunk) => this.#forward(chunk)));
      if (metadata !== undefined) await this.#waitForSave(metadata);
    } finally {
      for (const { record } of chunks) record.inBatch = false;
    }
  }

  async #forward({ record, numTokens }: Chunk): Promise<void> {
    const { request, numComputedTokens } = record;
    const promptLength = request.promptTokens.length;
    const span =
      record.span === undefined || numComputedTokens >= promptLength
        ? undefined
        : this.#ambient.tracer?.start("kv_engine.compute_prompt", {
            parent: record.span.traceparent,
            attributes: { "kv.tokens": numTokens },
          });
    try {
      const token = await this.#runner.advance(record, numTokens);
      span?.end();
      if (numComputedTokens < promptLength)
        this.#scheduler.cachePrompt(record, Math.min(record.numComputedTokens, promptLength));
      if (token !== undefined && record.ending === undefined) this.#emit(record, token);
    } catch (error) {
      span?.end(error);
      const message = `request ${request.requestId} failed in the model`;
      record.end("error", KvError.from(error, "KV_ENGINE_FAILED", message));
    }
  }

  #emit(record: RequestRecord, token: number): void {
    const { request, output, receivedMs } = record;
    const { clock, tracer } = this.#ambient;
    if (output.length === 1 && receivedMs !== undefined) {
      const sinceMs = clock.now() - receivedMs;
      this.#options.hooks?.afterFirstToken?.(request.requestId, sinceMs);
    }
    request.onToken?.(token);
    const reason = record.stopReason(this.#options.model.config.eosTokenIds);
    if (reason !== undefined) record.end(reason);
    else if (output.length === 1 && record.span !== undefined)
      record.generateSpan = tracer?.start("kv_engine.generate", {
        parent: record.span.traceparent,
      });
  }

  /** Waits until blocks that a peer may read are staged; a request with one that is not, fails. */
  async #waitForSave(metadata: StepMetadata): Promise<void> {
    const running = this.#scheduler.inState("running");
    const computed = Object.fromEntries(
      running.map(({ request, numComputedTokens }) => [request.requestId, numComputedTokens]),
    );
    const outcomes = await Promise.allSettled(
      this.#workers.map((worker) => worker.waitForSave(metadata, computed)),
    );
    for (const outcome of outcomes) {
      if (outcome.status === "fulfilled") continue;
      const error: unknown = outcome.reason;
      const requestIds = KvError.is(error, "KV_STAGING_FAILED")
        ? error.details["requestIds"]
        : undefined;
      if (!Array.isArray(requestIds)) throw error;
      for (const record of this.#scheduler.requests) {
        if (!requestIds.includes(record.request.requestId)) continue;
        // This replaces any other reason: no peer may be sent to blocks that are not staged.
        record.ending = { reason: "error", error: KvError.from(error, "KV_STAGING_FAILED", "") };
      }
    }
  }

  async #finishEnded(): Promise<void> {
    for (const requestId of await this.#scheduler.finishEnded()) {
      this.#options.model.dropSequence(requestId).catch((failure: unknown) => {
        this.#ambient.log.warn("sequence-not-dropped", { requestId, error: String(failure) });
      });
      this.#wakeup.wake();
    }
  }

  /**
   * The first step for pending work follows at once, because a peer may wait for it; the next ones
   * after a pause, so that a connector with permanent work does not spin.
   */
  #scheduleNextStep(): void {
    // A request that is in a batch is continued by the batch's end.
    const isRunning = this.#scheduler.inState("running").some(({ inBatch }) => !inBatch);
    const hasPendingWork = !isRunning && this.#connector?.hasPendingWork() === true;
    if (isRunning || (hasPendingWork && !this.#steppedForWork)) this.#wakeup.wake();
    else if (hasPendingWork) {
      this.#pendingWorkTimer ??= this.#ambient.clock.setTimer(() => {
        this.#pendingWorkTimer = undefined;
        this.#wakeup.wake();
      }, PENDING_WORK_PAUSE_MS);
    }
    this.#steppedForWork = hasPendingWork;
  }

  #resolveIdle(): void {
    for (const resolve of this.#idleWaiters.splice(0)) resolve();
  }

  async idle(): Promise<void> {
    if (this.#scheduler.isIdle) return;
    await new Promise<void>((resolve) => this.#idleWaiters.push(resolve));
  }

  requestCounts(): Readonly<Record<"waiting" | "remote" | "running", number>> {
    const scheduler = this.#scheduler;
    return {
      waiting: scheduler.inState("waiting").length,
      remote: scheduler.inState("remote").length,
      running: scheduler.inState("running").length,
    };
  }

  outstanding(): Readonly<Record<string, number>> {
    const scheduler = this.#scheduler;
    return {
      ...this.requestCounts(),
      kept: scheduler.keptRequests,
      blocks: this.#options.blocks.held,
      servedBlocks: this.#options.tier?.servedBlocks ?? 0,
      partlyReported: this.#aggregator.size,
      ...this.#connector?.outstanding(),
    };
  }

  /** Aborts all requests. Model, pool and connector belong to the caller. */
  close(): Promise<void> {
    this.#closing ??= Promise.resolve().then(() => this.#shutDown());
    return this.#closing;
  }

  async #shutDown(): Promise<void> {
    this.#scheduler.abortAll("the engine is shutting down");
    this.#wakeup.wake();
    await this.#loop;
    this.sleepMode.close();
    // One more step reports the last aborts to the workers.
    if (!this.sleepMode.isAsleep) await this.#safeStep();
    this.#pendingWorkTimer?.cancel();
    this.#resolveIdle();
  }
}

/** A wake-up before the sleep is not lost. */
class Wakeup {
  #pending = false;
  #resume: (() => void) | undefined;

  wake(): void {
    this.#pending = true;
    this.#resume?.();
    this.#resume = undefined;
  }

  async sleep(): Promise<void> {
    if (!this.#pending) {
      await new Promise<void>((resolve) => {
        this.#resume = resolve;
      });
    }
    this.#pending = false;
  }
}
