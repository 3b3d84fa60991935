import type { Log } from "@kv/interface";
import type { Subscriber } from "zeromq";
import type { Instance } from "../instances/instance.js";
import type { CachedPrefixes } from "../routing/prefix-aware.js";
import { BlockIndex } from "./block-index.js";
import { readKvEventBatch } from "./kv-event-batch.js";

/** Subscribes to the KV events that vLLM publishes over ZMQ (`--kv-events-config`), for each instance that names its endpoint. */
export class KvEventSubscriber implements CachedPrefixes {
  readonly #log: Log;
  readonly #subscriptions = new Map<Instance, Subscription>();

  constructor(log: Log) {
    this.#log = log;
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
        this.#subscriptions.set(instance, new Subscription(kvEvents, this.#log));
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

/** The subscription to one instance, and the index that its events build. */
class Subscription {
  readonly index = new BlockIndex();
  readonly #endpoint: string;
  readonly #log: Log;
  #socket: Subscriber | undefined = undefined;
  #closed = false;
  #nextSequence: bigint | undefined = undefined;

  constructor(endpoint: string, log: Log) {
    this.#endpoint = endpoint;
    this.#log = log;
    this.#receive().catch((error: unknown) => {
      if (!this.#closed) log.warn("kv-events-failed", { endpoint, error });
    });
  }

  close(): void {
    this.#closed = true;
    this.#socket?.close();
  }

  async #receive(): Promise<void> {
    const { Subscriber } = await import("zeromq");
    if (this.#closed) return;
    const socket = new Subscriber({ linger: 0, maxMessageSize: 32 * 1024 * 1024 });
    this.#socket = socket;
    socket.connect(this.#endpoint);
    socket.subscribe();
    for await (const [, sequence, payload] of socket) {
      if (sequence?.length !== 8 || payload === undefined) continue;
      this.#apply(sequence.readBigUInt64BE(), payload);
    }
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
      this.#log.warn("kv-events-malformed", { endpoint, error });
    }
  }
}
