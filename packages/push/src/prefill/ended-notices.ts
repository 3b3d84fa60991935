import { type RemoteEngines, TaskTracker, type WorkerContext } from "@kv/connector/building-blocks";
import type { KvError } from "@kv/interface";
import { encodeNotification, encodeRegistrationEnded, type Registration } from "@kv/protocol";
import type { ConsumerEngine } from "./consumer-engine.js";
import type { LayerwiseWrites } from "./layerwise-writes.js";
import { consumerOf } from "./write-blocks.js";

/** The parts that ended notices need. */
export interface EndedNoticesOptions {
  readonly consumers: Pick<RemoteEngines<ConsumerEngine>, "acquire">;
  readonly context: Pick<WorkerContext, "local" | "log" | "notifications" | "options">;
  /** Undefined without layer-wise push. */
  readonly layerwise: Pick<LayerwiseWrites, "abort"> | undefined;
}

/**
 * vLLM's `NIXL_CONNECTOR_VERSION` from which a D is told in vllm#50754's form. No release has it:
 * 15 is that of 0.33.
 */
const PUSH_FAILURE_VERSION = 16;

/**
 * Sends `push_ended` to consumers: no WRITE of a registration is in flight, and none will come. A
 * vLLM consumer gets `PUSH_FAIL` where its version has it, and no notice up to 0.33, whose protocol
 * has none. Best effort: if the notice is lost, the consumer repeats its withdrawal.
 */
export class EndedNotices {
  readonly #options: EndedNoticesOptions;
  readonly #sending = new TaskTracker();
  #closed = false;

  constructor(options: EndedNoticesOptions) {
    this.#options = options;
  }

  /**
   * Aborts the layer-wise writes for a registration, and sends the notice with this error when they
   * have ended.
   */
  send(key: string, registration: Registration, error: KvError): void {
    if (this.#closed) return;
    const ended = this.#options.layerwise?.abort(key, error) ?? Promise.resolve();
    const { connectorVersion } = this.#options.context.options.engine.model;
    if (registration.own === undefined && connectorVersion < PUSH_FAILURE_VERSION) return;
    this.#sending.track(ended.then(() => this.#send(registration, error)));
  }

  get size(): number {
    return this.#sending.size;
  }

  idle(): Promise<void> {
    return this.#sending.idle();
  }

  close(): void {
    this.#closed = true;
  }

  async #send(registration: Registration, error: KvError): Promise<void> {
    const { consumers, context } = this.#options;
    const { local, notifications, log } = context;
    const { own, wireId } = registration;
    const { code, message } = error;
    const failed = (reason: unknown) =>
      log.debug("push-ended-notice-failed", {
        request: wireId,
        rank: own?.rank,
        error: String(reason),
      });
    const payload =
      own === undefined
        ? encodeNotification({ kind: "push-failure", requestId: wireId, readers: local.tpSize })
        : encodeRegistrationEnded({ ...own, wireId, code, message });
    await consumers
      .acquire(consumerOf(registration), undefined, false)
      .then(async ({ engine, release }) => {
        // All ranks of a vLLM D send the same registration.
        const told = [...engine.targets].filter(([rank]) => own === undefined || rank === own.rank);
        await Promise.all(told.map(([, { agent }]) => notifications.send(agent, payload, failed)));
        release();
      }, failed);
  }
}
