import { type RemoteEngines, TaskTracker, type WorkerContext } from "@kv/connector/building-blocks";
import type { KvError } from "@kv/interface";
import { encodeRegistrationEnded, type Registration } from "@kv/protocol";
import type { ConsumerEngine } from "./consumer-engine.js";
import type { LayerwiseWrites } from "./layerwise-writes.js";
import { consumerOf } from "./write-blocks.js";

/** The parts that ended notices need. */
export interface EndedNoticesOptions {
  readonly consumers: Pick<RemoteEngines<ConsumerEngine>, "acquire">;
  readonly context: Pick<WorkerContext, "log" | "notifications">;
  /** Undefined without layer-wise push. */
  readonly layerwise: Pick<LayerwiseWrites, "abort"> | undefined;
}

/**
 * Sends `push_ended` to consumers: no WRITE of a registration is in flight, and none will come. A vLLM consumer gets no notice, because
 * its protocol has none. Best effort: if the notice is lost, the consumer repeats its withdrawal.
 */
export class EndedNotices {
  readonly #options: EndedNoticesOptions;
  readonly #sending = new TaskTracker();
  #closed = false;

  constructor(options: EndedNoticesOptions) {
    this.#options = options;
  }

  /** Aborts the layer-wise writes for a registration, and sends the notice with this error when they have ended. */
  send(key: string, registration: Registration, error: KvError): void {
    if (this.#closed) return;
    const ended = this.#options.layerwise?.abort(key, error) ?? Promise.resolve();
    if (registration.own === undefined) return;
    this.#sending.track(ended.then(() => this.#send(registration, error)));
  }

  /** The number of notices that are being sent. */
  get size(): number {
    return this.#sending.size;
  }

  /** Resolves when no notice is being sent. */
  idle(): Promise<void> {
    return this.#sending.idle();
  }

  /** Makes `send` do nothing from now on. */
  close(): void {
    this.#closed = true;
  }

  async #send(registration: Registration, error: KvError): Promise<void> {
    const { consumers, context } = this.#options;
    const { notifications, log } = context;
    const { own, wireId } = registration;
    if (own === undefined) return;
    const { incarnation, generation, rank, secret } = own;
    const { code, message } = error;
    const failed = (reason: unknown) =>
      log.debug("push-ended-notice-failed", { request: wireId, rank, error: String(reason) });
    await consumers.acquire(consumerOf(registration), undefined, false).then(async ({ engine, release }) => {
      const agent = engine.targets.get(rank)?.agent;
      if (agent !== undefined) {
        const payload = encodeRegistrationEnded({
          ...{ wireId, incarnation, generation, secret, code, message },
        });
        await notifications.send(agent, payload, failed);
      }
      release();
    }, failed);
  }
}
