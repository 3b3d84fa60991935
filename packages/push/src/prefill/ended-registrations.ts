import {
  ExpiringSet,
  type RemoteEngines,
  TaskTracker,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import type { Clock, KvError } from "@kv/interface";
import { encodeRegistrationEnded, type Registration } from "@kv/protocol";
import { type ConsumerEngine, consumerOf } from "./consumer-engine.js";
import type { LayerwiseWrites } from "./layerwise-writes.js";

const MAX_KEYS = 65_536;
const MAX_CONSUMERS = 4096;

/**
 * The registrations that have ended at this producer rank, so that one that arrives late or twice is not served. Each is remembered by
 * its key for a while. Beyond that, each consumer process has a watermark: every message names the oldest generation that the consumer
 * has open, and a generation below it never becomes valid again.
 */
export class EndedRegistrations {
  readonly #keys: ExpiringSet;
  /** The oldest generation that is still valid, by consumer process; the process that was quiet for longest comes first. */
  readonly #watermarks = new Map<string, number>();

  constructor({ clock, rememberMs }: { readonly clock: Clock; readonly rememberMs: number }) {
    this.#keys = new ExpiringSet({ clock, ttlMs: rememberMs, maxSize: MAX_KEYS });
  }

  /** Remembers that the registration with this key has ended. */
  add(key: string): void {
    this.#keys.add(key);
  }

  /** True if the registration with this key has ended and is still remembered. */
  has(key: string): boolean {
    return this.#keys.has(key);
  }

  /**
   * Raises the watermark of the consumer process to the oldest open generation that the registration names. Returns false if the
   * registration's own generation lies below the watermark. A vLLM consumer sends no generation: the result is always true.
   */
  isOpen({ engineId, own }: Registration): boolean {
    if (own === undefined) return true;
    const process = JSON.stringify([engineId, own.incarnation, own.secret]);
    const watermark = Math.max(this.#watermarks.get(process) ?? 0, own.oldestOpen);
    this.#watermarks.delete(process);
    this.#watermarks.set(process, watermark);
    const [oldest] = this.#watermarks.keys();
    if (this.#watermarks.size > MAX_CONSUMERS && oldest !== undefined) this.#watermarks.delete(oldest);
    return own.generation >= watermark;
  }
}

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
