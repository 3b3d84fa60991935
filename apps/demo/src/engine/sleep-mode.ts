import type { createWorkerOutputAggregator } from "@kv/connector";
import { KvError, type SchedulerConnector, type WorkerConnector } from "@kv/interface";
import type { BlockPool } from "./cache/block-pool.js";
import type { KvPool } from "./cache/kv-pool.js";
import type { Scheduler } from "./scheduler.js";

export interface SleepModeOptions {
  readonly connector: SchedulerConnector | undefined;
  readonly workers: readonly WorkerConnector[];
  readonly aggregator: ReturnType<typeof createWorkerOutputAggregator>;
  readonly scheduler: Scheduler;
  readonly pool: Pick<KvPool, "caches">;
  readonly blocks: Pick<BlockPool, "forgetContent">;
  wakeLoop(): void;
}

/**
 * vLLM's sleep mode: an engine gives its caches back to the transport, and registers them again.
 * Their content is then gone; the memory stays allocated.
 */
export class SleepMode {
  readonly #options: SleepModeOptions;
  /** `falling`: requests end. `asleep`: the transport does not know the caches. */
  #state: "awake" | "falling" | "asleep" = "awake";
  #closed = false;
  /** Ends after the last call of `sleep` or `wakeUp`; never rejects. */
  #lastChange: Promise<void> = Promise.resolve();
  #fellAsleep: (error?: unknown) => void = () => {};

  constructor(options: SleepModeOptions) {
    this.#options = options;
  }

  get isOn(): boolean {
    return this.#state !== "awake";
  }

  get isAsleep(): boolean {
    return this.#state === "asleep";
  }

  requireAwake(requestId: string): void {
    if (!this.isOn) return;
    const message = `request ${requestId}: the engine sleeps`;
    throw new KvError("KV_ENGINE_FAILED", message, { details: { httpStatus: 503 } });
  }

  /**
   * Ends all requests with `KV_REQUEST_ABORTED`. Resolves when no peer can touch the caches.
   * @throws `KV_ENGINE_FAILED` for a connector without `unregisterKvCaches`, and after `close`.
   */
  sleep(): Promise<void> {
    return this.#change(async () => {
      const { connector, workers, scheduler, wakeLoop } = this.#options;
      if (this.#state === "asleep") return;
      if (workers.some(({ unregisterKvCaches }) => unregisterKvCaches === undefined))
        throw new KvError(
          "KV_ENGINE_FAILED",
          `connector ${connector?.name} cannot give its caches back`,
        );
      const fellAsleep = new Promise<unknown>((resolve) => {
        this.#fellAsleep = resolve;
      });
      this.#state = "falling";
      scheduler.abortAll("the engine goes to sleep");
      wakeLoop();
      const error = await fellAsleep;
      if (error === undefined) return;
      throw KvError.from(error, "KV_ENGINE_FAILED", "the engine cannot sleep");
    });
  }

  /**
   * Registers the caches again: peers shake hands anew. `KV_ENGINE_FAILED` after `close`.
   * @throws The errors of the connector; the engine sleeps on then.
   */
  wakeUp(): Promise<void> {
    return this.#change(async () => {
      if (this.#state === "awake") return;
      const { connector, workers, pool, wakeLoop } = this.#options;
      for (const [rank, worker] of workers.entries()) {
        const caches = pool.caches[rank];
        if (caches !== undefined) await worker.registerKvCaches(caches);
      }
      await connector?.setHandshakeMetadata(
        await Promise.all(workers.map((worker) => worker.handshakeMetadata())),
      );
      this.#state = "awake";
      wakeLoop();
    });
  }

  /**
   * Gives the caches back when no request is left. `step` tells the workers of the last ends. Never
   * rejects.
   */
  async betweenSteps(step: () => Promise<void>): Promise<void> {
    const { workers, aggregator, scheduler, blocks } = this.#options;
    if (this.#state !== "falling" || scheduler.requests.length > 0) return;
    try {
      await step();
      await Promise.all(workers.map((worker) => worker.unregisterKvCaches?.()));
      this.#state = "asleep";
      // What peers held until now.
      for (const [tpRank, worker] of workers.entries())
        await scheduler.applyWorkerOutput(aggregator.add({ tpRank }, worker.collectFinished()));
      blocks.forgetContent();
      this.#fellAsleep();
    } catch (error) {
      if (this.#state === "falling") this.#state = "awake";
      this.#fellAsleep(error);
    }
  }

  close(): void {
    this.#closed = true;
    this.#fellAsleep(new KvError("KV_ENGINE_FAILED", "the engine is shutting down"));
  }

  #change(change: () => Promise<void>): Promise<void> {
    const changed = this.#lastChange.then(() => {
      if (!this.#closed) return change();
      throw new KvError("KV_ENGINE_FAILED", "the engine is shutting down");
    });
    this.#lastChange = changed.catch(() => {});
    return changed;
  }
}
