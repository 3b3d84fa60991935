import {
  type EngineReference,
  isPeerLost,
  type RemoteEngines,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import { KvError, type Span } from "@kv/interface";
import type { Registration } from "@kv/protocol";
import { type ConsumerEngine, consumerOf } from "./consumer-engine.js";
import { type BlockWrite, writeBlocks } from "./write-blocks.js";

/** A write that the dispatcher runs or queues. */
export interface DispatchedWrite extends BlockWrite {
  /** Aborts the write. The dispatcher aborts it at the deadline. */
  readonly controller: AbortController;
  /** Set when the consumer withdrew its registration. A write that ends because of it has not failed. */
  withdrawn?: boolean | undefined;
}

/** How many writes to one consumer engine run at once. The transport executes them one after another anyway. */
const WRITES_PER_CONSUMER = 8;

interface ConsumerQueue {
  running: number;
  /** Functions that start the waiting writes, in order. */
  readonly waiting: (() => Promise<void>)[];
}

/**
 * Runs the writes of a producer rank. Each consumer engine has a queue and a number of slots of its own, so a slow or dead consumer
 * does not delay others. Each write has a deadline and goes to the process that registered.
 */
export class WriteDispatcher {
  readonly #context: WorkerContext;
  readonly #consumers: RemoteEngines<ConsumerEngine>;
  readonly #queues = new Map<string, ConsumerQueue>();
  readonly #running = new Set<Promise<void>>();
  #waiting = 0;

  /** `consumers`: the consumer engines that are open. */
  constructor(context: WorkerContext, consumers: RemoteEngines<ConsumerEngine>) {
    this.#context = context;
    this.#consumers = consumers;
  }

  /**
   * Writes when a slot of the consumer engine is free, in the order of the calls. Resolves when no transfer of it can touch memory any
   * more, with the error if it failed; never rejects. A failure is counted and logged under vLLM's failure types, unless the registration
   * was withdrawn.
   */
  write(write: DispatchedWrite): Promise<KvError | undefined> {
    // A registration names its engine itself: the address keeps one engine from taking the slots of another.
    const { engineId, host, port } = write.registration;
    const consumer = JSON.stringify([engineId, host, port]);
    const queue = this.#queues.get(consumer) ?? { running: 0, waiting: [] };
    this.#queues.set(consumer, queue);
    this.#waiting += 1;
    const { order } = write;
    const span = this.#context.tracer?.start("kv.push", {
      parent: order.traceparent,
      attributes: { "kv.request_id": order.requestId, "kv.remote_engine_id": engineId },
    });
    return new Promise((resolve) => {
      queue.waiting.push(() => this.#run(write, span).then(resolve));
      this.#startNext(consumer, queue);
    });
  }

  /** The number of writes that run or wait. */
  get size(): number {
    return this.#running.size + this.#waiting;
  }

  /** Resolves when no write runs or waits. */
  async idle(): Promise<void> {
    while (this.#running.size > 0) await Promise.all(this.#running);
  }

  #startNext(consumer: string, queue: ConsumerQueue): void {
    while (queue.running < WRITES_PER_CONSUMER) {
      const start = queue.waiting.shift();
      if (start === undefined) break;
      this.#waiting -= 1;
      queue.running += 1;
      const run = start().finally(() => {
        this.#running.delete(run);
        queue.running -= 1;
        this.#startNext(consumer, queue);
      });
      this.#running.add(run);
    }
    if (queue.running === 0 && queue.waiting.length === 0) this.#queues.delete(consumer);
  }

  /** Opens the process that registered, and writes within the deadline. */
  async #run(write: DispatchedWrite, span: Span | undefined): Promise<KvError | undefined> {
    const { clock, settings } = this.#context;
    const writeTimeoutMs = settings.requestTimeoutMs;
    const { registration, controller, order } = write;
    const parent = span?.traceparent;
    span?.event("started");
    const { signal } = controller;
    const timer = clock.setTimer(
      () => controller.abort(timedOut(registration, writeTimeoutMs)),
      writeTimeoutMs,
    );
    let reference: EngineReference<ConsumerEngine> | undefined;
    try {
      signal.throwIfAborted();
      reference = await this.#consumers.acquire(consumerOf(registration, parent), signal);
      const traced = { ...write, order: { ...order, traceparent: parent } };
      await writeBlocks(reference.engine, traced, signal, this.#context);
      span?.end();
      return undefined;
    } catch (thrown) {
      span?.end(thrown);
      return this.#failed(write, reference?.engine, thrown);
    } finally {
      timer.cancel();
      reference?.release();
    }
  }

  #failed(write: DispatchedWrite, consumer: ConsumerEngine | undefined, thrown: unknown): KvError {
    const { log, metrics } = this.#context;
    const { requestId } = write.order;
    const { engineId } = write.registration;
    const error = KvError.from(thrown, "KV_TRANSFER_FAILED", `the WRITE of request ${requestId}`);
    const failureType = consumer === undefined ? "push_handshake_failed" : "transfer_failed";
    if (write.withdrawn !== true) {
      if (consumer !== undefined) metrics.transferFailed();
      log.warn(failureType, { requestId, engineId, code: error.code, error: error.message });
    }
    if (consumer !== undefined && isPeerLost(error)) this.#consumers.drop(consumer, error.message);
    return error;
  }
}

function timedOut({ wireId, engineId }: Registration, timeoutMs: number): KvError {
  return new KvError(
    "KV_TRANSFER_TIMEOUT",
    `the KV of request ${wireId} was not written to engine ${engineId} within ${timeoutMs} ms`,
    { details: { engineId, timeoutMs } },
  );
}
