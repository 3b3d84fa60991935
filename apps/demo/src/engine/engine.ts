import { createWorkerOutputAggregator } from "@kv/connector";
import {
  type Ambient,
  ambient,
  KvError,
  type SchedulerConnector,
  type StepMetadata,
  type Timer,
  type WorkerConnector,
} from "@kv/interface";
import { admit } from "./admission.js";
import type { BlockPool } from "./cache/block-pool.js";
import type { KvPool } from "./cache/kv-pool.js";
import { concludeEnded } from "./conclusion.js";
import type { EngineModel } from "./engine-model.js";
import { type EngineState, end, inState } from "./engine-state.js";
import type { EngineHooks } from "./hooks.js";
import { advance, isPrefill, stopReason } from "./model-runner.js";
import { applyOutput } from "./receiving.js";
import {
  checkRequest,
  type EngineHandle,
  type EngineRequest,
  openRecord,
  type RequestRecord,
} from "./request.js";
import { createWakeup } from "./wakeup.js";

export interface EngineOptions extends Partial<Ambient> {
  readonly model: EngineModel;
  readonly pool: KvPool;
  readonly blocks: BlockPool;
  /** Absent: an engine on its own, that neither sends nor receives. `workers` has one entry per rank of `pool`. */
  readonly connector?: {
    readonly scheduler: SchedulerConnector;
    readonly workers: readonly WorkerConnector[];
  };
  readonly hooks?: EngineHooks;
  /** Requests that hold blocks at once. */
  readonly maxNumSeqs?: number;
  /** Workers are told of each layer of a prompt that is computed. */
  readonly reportLayers?: boolean;
  /** Prompts find blocks of earlier ones; true by default. */
  readonly prefixCaching?: boolean;
}

/**
 * A small paged engine with continuous batching. One loop, which sleeps while there is nothing to do and is woken by a new
 * request, an abort, or a worker connector with news; each turn is one engine step in the order that `connector.ts` of
 * `@kv/interface` gives.
 */
export interface Engine {
  /** Errors, thrown: those of `checkRequest`; `KV_REQUEST_INVALID` for an id in use; `KV_ENGINE_FAILED` after `close`. */
  submit(request: EngineRequest): EngineHandle;
  /** Resolves when no request is alive and no block is kept for a peer. */
  idle(): Promise<void>;
  /** What is held now; all zero when idle. */
  outstanding(): Readonly<Record<string, number>>;
  /** Aborts what is alive, tells the connector, ends the loop. The collaborators stay open: they belong to the caller. */
  close(): Promise<void>;
}

const PENDING_WORK_PAUSE_MS = 1;

export function createEngine(options: EngineOptions): Engine {
  const { model, pool, blocks, connector, hooks = {}, maxNumSeqs = 64, prefixCaching = true } = options;
  const { clock, log, random } = ambient(options);
  const state: EngineState = {
    model,
    pool,
    blocks,
    blockSize: pool.config.blockSize,
    scheduler: connector?.scheduler,
    workers: connector?.workers ?? [],
    hooks,
    clock,
    log,
    wakeup: createWakeup(),
    alive: new Map(),
    held: new Map(),
  };
  const { alive, held, blockSize, scheduler, workers, wakeup } = state;
  const aggregator = createWorkerOutputAggregator({ workers: workers.length });
  const idleWaiters: (() => void)[] = [];
  let closing: Promise<void> | undefined;
  let pending: Timer | undefined;
  /** The step that is over asked for another one for pending work alone. */
  let steppedForWork = false;

  for (const worker of workers) worker.onProgress(() => wakeup.wake());

  function submit(request: EngineRequest): EngineHandle {
    const { requestId } = request;
    if (closing !== undefined)
      throw new KvError("KV_ENGINE_FAILED", `request ${requestId}: the engine is shutting down`);
    if (alive.has(requestId) || held.has(requestId)) {
      throw new KvError("KV_REQUEST_INVALID", `request ${requestId}: another request has this id`);
    }
    checkRequest(request, { model: model.config, blockSize, capacity: blocks.capacity });
    const { record, done } = openRecord(request, { blockSize, uniform: random.next, prefixCaching });
    alive.set(requestId, record);
    scheduler?.requestQueued?.(record.connectorRequest);
    wakeup.wake();
    return {
      requestId,
      done,
      abort: (reason = "the client went away") => abort(record, reason),
    };
  }

  function abort(record: RequestRecord, reason: string): void {
    const { requestId } = record.request;
    if (!alive.has(requestId)) return;
    end(record, "aborted", new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted: ${reason}`));
    wakeup.wake();
  }

  function admitWaiting(): void {
    let room = maxNumSeqs - inState(state, "running").length - inState(state, "remote").length;
    for (const record of inState(state, "waiting")) {
      if (room-- <= 0) return;
      if (record.ending !== undefined) continue;
      try {
        // First come, first served: one that does not fit holds back those behind it, or it would never run.
        if (!admit(record, { blocks, blockSize, scheduler })) return;
        record.remoteSinceMs = clock.now();
      } catch (error) {
        // The connector refused: no peer will write into the blocks.
        if (record.state === "remote") record.state = "running";
        const { requestId } = record.request;
        end(
          record,
          "error",
          KvError.from(error, "KV_ENGINE_FAILED", `request ${requestId} was not admitted`),
        );
      }
    }
  }

  /** Every running request makes a token, but only one of those with a prompt to compute: the first to come. */
  async function forwardPass(): Promise<void> {
    const running = inState(state, "running").filter((record) => record.ending === undefined);
    const prefill = running.find(isPrefill);
    const batch = running.filter((record) => record === prefill || !isPrefill(record));
    await Promise.all(batch.map(forwardOne));
  }

  async function forwardOne(record: RequestRecord): Promise<void> {
    const { request } = record;
    try {
      const startedMs = clock.now();
      const token = await advance(record, {
        model,
        pool,
        blocks,
        clock,
        ...(options.reportLayers === true && isPrefill(record) ? { layerInPool } : {}),
      });
      record.forwardMs += clock.now() - startedMs;
      if (record.ending !== undefined) return;
      request.onToken?.(token);
      const reason = stopReason(record, model.config.eosTokenIds);
      if (reason !== undefined) end(record, reason);
    } catch (error) {
      end(
        record,
        "error",
        KvError.from(error, "KV_ENGINE_FAILED", `request ${request.requestId} failed in the model`),
      );
    }
  }

  function layerInPool({ request: { requestId } }: RequestRecord, layer: number, tokens: number): void {
    for (const [rank, worker] of workers.entries()) {
      const names = pool.caches[rank]?.regions.map(({ name }) => name) ?? [];
      const perLayer = names.length / model.config.layers;
      const regions = names.slice(layer * perLayer, (layer + 1) * perLayer);
      worker.layerComputed?.({ regions, computedTokens: { [requestId]: tokens } });
    }
  }

  async function step(): Promise<void> {
    admitWaiting();
    const metadata = scheduler?.buildStepMetadata();
    if (metadata !== undefined) {
      for (const record of inState(state, "remote")) record.announced = true;
      for (const worker of workers) worker.startLoad(metadata);
    }
    await forwardPass();
    if (metadata !== undefined) await saved(metadata);
    const outputs = workers.map((worker, tpRank) => aggregator.add(tpRank, worker.collectFinished()));
    await concludeEnded(state);
    for (const output of outputs) await applyOutput(output, state);
    const running = inState(state, "running").length > 0;
    const pendingWork = !running && scheduler?.hasPendingWork() === true;
    if (running) wakeup.wake();
    else if (pendingWork) stepAgain();
    steppedForWork = pendingWork;
  }

  /** What a peer may read is where it can be read; a request whose blocks could not be put there ends. */
  async function saved(metadata: StepMetadata): Promise<void> {
    const computed: Record<string, number> = {};
    for (const record of inState(state, "running")) {
      computed[record.request.requestId] = record.numComputedTokens;
    }
    const outcomes = await Promise.allSettled(
      workers.map((worker) => worker.waitForSave(metadata, computed)),
    );
    for (const outcome of outcomes) {
      if (outcome.status === "fulfilled") continue;
      const error: unknown = outcome.reason;
      const requestIds = KvError.is(error, "KV_STAGING_FAILED") ? error.details?.["requestIds"] : undefined;
      if (!Array.isArray(requestIds)) throw error;
      for (const requestId of requestIds) {
        const record = alive.get(String(requestId));
        // Whatever it would have ended with: nobody may be told that the blocks are there.
        if (record !== undefined)
          record.ending = { reason: "error", error: KvError.from(error, "KV_STAGING_FAILED", "") };
      }
    }
  }

  /**
   * For a connector that needs a step although nothing runs: at once, for a peer may wait for what it has to say. The next one after a
   * pause, so that a connector that always says so does not spin.
   */
  function stepAgain(): void {
    if (!steppedForWork) {
      wakeup.wake();
      return;
    }
    pending ??= clock.setTimer(() => {
      pending = undefined;
      wakeup.wake();
    }, PENDING_WORK_PAUSE_MS);
  }

  async function safeStep(): Promise<void> {
    try {
      await step();
    } catch (error) {
      const failure = KvError.from(error, "KV_ENGINE_FAILED", "an engine step failed");
      log.error("engine-step-failed", { code: failure.code, message: failure.message });
      for (const record of alive.values()) end(record, "error", failure);
      await concludeEnded(state);
    }
    if (alive.size === 0 && held.size === 0) for (const resolve of idleWaiters.splice(0)) resolve();
  }

  const loop = (async () => {
    while (closing === undefined || alive.size > 0) {
      await wakeup.sleep();
      await safeStep();
    }
  })();

  async function shutDown(): Promise<void> {
    for (const record of alive.values()) {
      const message = `request ${record.request.requestId} was aborted: the engine is shutting down`;
      end(record, "aborted", new KvError("KV_REQUEST_ABORTED", message, { details: { httpStatus: 503 } }));
    }
    wakeup.wake();
    await loop;
    // One more step carries the last ends to the workers.
    await safeStep();
    pending?.cancel();
    for (const resolve of idleWaiters.splice(0)) resolve();
  }

  return {
    submit,
    async idle() {
      if (alive.size === 0 && held.size === 0) return;
      await new Promise<void>((resolve) => {
        idleWaiters.push(resolve);
      });
    },
    outstanding: () => ({
      waiting: inState(state, "waiting").length,
      remote: inState(state, "remote").length,
      running: inState(state, "running").length,
      kept: held.size,
      blocks: blocks.held,
      partlyReported: aggregator.size,
      ...scheduler?.outstanding(),
    }),
    close() {
      closing ??= Promise.resolve().then(shutDown);
      return closing;
    },
  };
}
