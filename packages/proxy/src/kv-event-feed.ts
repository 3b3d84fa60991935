import type { Log } from "@kv/interface";
import type { Subscriber } from "zeromq";
import type { Instance } from "./instance.js";
import { readKvEventBatch } from "./kv-event-batch.js";
import { type BlockIndex, type CachedPrefixes, createBlockIndex } from "./kv-event-index.js";

interface Subscription {
  readonly index: BlockIndex;
  close(): void;
}

/** Follows the KV events that vLLM publishes over ZMQ (`--kv-events-config`), for each instance that names its endpoint. */
export function followKvEvents(log: Log): CachedPrefixes {
  const subscriptions = new Map<Instance, Subscription>();
  return {
    matchedTokens: (instance, tokens) => subscriptions.get(instance)?.index.matchedTokens(tokens),
    follow(instances) {
      for (const instance of instances) {
        const { kvEvents } = instance;
        if (kvEvents !== undefined && !subscriptions.has(instance))
          subscriptions.set(instance, subscribe(kvEvents, log));
      }
      for (const [instance, subscription] of subscriptions) {
        if (instances.includes(instance)) continue;
        subscription.close();
        subscriptions.delete(instance);
      }
    },
    close() {
      for (const subscription of subscriptions.values()) subscription.close();
      subscriptions.clear();
    },
  };
}

function subscribe(endpoint: string, log: Log): Subscription {
  const index = createBlockIndex();
  let socket: Subscriber | undefined;
  let closed = false;

  async function listen(): Promise<void> {
    const { Subscriber } = await import("zeromq");
    if (closed) return;
    socket = new Subscriber({ linger: 0, maxMessageSize: 32 * 1024 * 1024 });
    socket.connect(endpoint);
    socket.subscribe();
    let expected: bigint | undefined;
    for await (const [, sequence, payload] of socket) {
      if (sequence?.length !== 8 || payload === undefined) continue;
      const at = sequence.readBigUInt64BE();
      // Batches were missed, or the server is a new one: what is known may be gone from its cache.
      if (expected !== undefined && at !== expected) {
        log.info("kv-events-missed", { endpoint, expected: String(expected), at: String(at) });
        index.cleared();
      }
      expected = at + 1n;
      try {
        for (const event of readKvEventBatch(payload)) {
          if (event.type === "stored") index.stored(event);
          else if (event.type === "removed") index.removed(event.hashes);
          else index.cleared();
        }
      } catch (error) {
        log.warn("kv-events-malformed", { endpoint, error });
      }
    }
  }
  listen().catch((error: unknown) => {
    if (!closed) log.warn("kv-events-failed", { endpoint, error });
  });
  return {
    index,
    close() {
      closed = true;
      socket?.close();
    },
  };
}
