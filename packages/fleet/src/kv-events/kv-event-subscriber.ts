import { type Clock, type Log, type LogFields, systemClock } from "@kv/interface";
import type { Instance } from "../instances/instance.js";
import type { CachedPrefixes } from "../routing/prefix-aware.js";
import { BlockIndex } from "./block-index.js";
import { readKvEventBatch } from "./kv-event-batch.js";
import { ZmqSubscription } from "./zmq-subscription.js";

/** Subscribes to the KV events that vLLM publishes over ZMQ (`--kv-events-config`), for each instance that names its endpoint. */
export class KvEventSubscriber implements CachedPrefixes {
  readonly #log: Log;
  readonly #clock: Clock;
  readonly #subscriptions = new Map<Instance, Subscription>();

  constructor(log: Log, clock: Clock = systemClock()) {
    this.#log = log;
    this.#clock = clock;
  }

  /** The tokens of a prompt that an instance has cached; undefined for an instance without an endpoint. */
  matchedTokens(instance: Instance, tokens: readonly number[]): number | undefined {
    return this.#subscriptions.get(instance)?.index.matchedTokens(tokens);
  }

  /** Subscribes to the instances of the list that name an endpoint, and ends the subscriptions of all others. */
  follow(instances: readonly Instance[]): void {
    for (const instance of instances) {
      const { kvEvents } = instance;
      if (kvEvents !== undefined && !this.#subscriptions.has(instance))
        this.#subscriptions.set(instance, new Subscription(kvEvents, this.#log, this.#clock));
    }
    for (const [instance, subscription] of this.#subscriptions) {
      if (instances.includes(instance)) continue;
      subscription.close();
      this.#subscriptions.delete(instance);
    }
  }

  /** Ends all subscriptions. */
  close(): void {
    for (const subscription of this.#subscriptions.values()) subscription.close();
    this.#subscriptions.clear();
  }

  [Symbol.dispose](): void {
    this.close();
  }
}

const WARNING_INTERVAL_MS = 10_000;

/** The subscription to one instance, and the index that its events build. */
class Subscription {
  readonly index = new BlockIndex();
  readonly #endpoint: string;
  readonly #log: Log;
  readonly #clock: Clock;
  readonly #socket: ZmqSubscription;
  #nextSequence: bigint | undefined = undefined;
  #warnedAtMs = Number.NEGATIVE_INFINITY;
  #suppressed = 0;

  constructor(endpoint: string, log: Log, clock: Clock) {
    this.#endpoint = endpoint;
    this.#log = log;
    this.#clock = clock;
    this.#socket = new ZmqSubscription({
      endpoint,
      clock,
      message: ([, sequence, payload]) => {
        if (sequence?.byteLength !== 8 || payload === undefined) return;
        const view = new DataView(sequence.buffer, sequence.byteOffset, sequence.byteLength);
        this.#apply(view.getBigUint64(0), payload);
      },
      lost: (reason) => this.#warn("kv-events-lost", { reason }),
    });
  }

  close(): void {
    this.#socket.close();
  }

  /** Logs at most once in ten seconds what an instance can cause as often as it likes. */
  #warn(event: string, fields: LogFields): void {
    if (this.#clock.now() - this.#warnedAtMs < WARNING_INTERVAL_MS) {
      this.#suppressed += 1;
      return;
    }
    this.#log.warn(event, { endpoint: this.#endpoint, ...fields, suppressed: this.#suppressed });
    this.#warnedAtMs = this.#clock.now();
    this.#suppressed = 0;
  }

  #apply(sequence: bigint, payload: Uint8Array): void {
    const expected = this.#nextSequence;
    const endpoint = this.#endpoint;
    // Batches were missed, or the server has restarted: blocks of the index may have been evicted.
    if (expected !== undefined && sequence !== expected) {
      this.#log.info("kv-events-missed", { endpoint, expected: String(expected), at: String(sequence) });
      this.index.cleared();
    }
    this.#nextSequence = sequence + 1n;
    try {
      for (const event of readKvEventBatch(payload)) {
        if (event.type === "stored") this.index.stored(event);
        else if (event.type === "removed") this.index.removed(event.hashes);
        else this.index.cleared();
      }
    } catch (error) {
      this.#warn("kv-events-malformed", { error });
    }
  }
}
