import type { Clock, Log, Timer } from "@kv/interface";
import { YieldingQueue } from "@kv/interface";
import { readTcpEndpoint } from "@kv/side-channel";
import { z } from "zod";
import { type Instance, instanceName, type KvEventStatus } from "../instances/instance.js";
import type { InstanceGet } from "../pairing/engine-facts.js";
import type { Steps } from "./block-index.js";
import { BlockTree, type PromptHolders } from "./block-tree.js";
import { type KvEventSource, KvEventStream } from "./kv-event-stream.js";

/** The prefixes that instances report to have in their caches. */
export interface CachedPrefixes {
  /**
   * How many tokens of a prompt, from its first, an instance has cached; undefined for an instance
   * that reports nothing.
   */
  matchedTokens(instance: Instance, tokens: ArrayLike<number>): number | undefined;
  /**
   * The instances that may have a begin of the prompt cached, the longest begin first; instances
   * that have a longer one mostly have the shorter ones, too. Without it, all instances are asked
   * for their tokens.
   */
  holders?(tokens: ArrayLike<number>): Iterable<PromptHolders>;
  follow(instances: readonly Instance[]): void;
  /** Whether an instance reports its cache, so that token ids are worth having. */
  readonly readsTokenIds?: boolean | undefined;
  status?(instance: Instance): KvEventStatus | null;
  close(): void;
}

/** What `KvEventSubscriber` gets from its user. */
export interface KvEventSubscriberOptions {
  /** Gets a warning about a publisher at most once in ten minutes. */
  readonly log: Log;
  readonly clock: Clock;
  /**
   * Asks instances where they publish. Without it, only instances whose configuration names the
   * endpoint are followed.
   */
  readonly get?: InstanceGet | undefined;
  /**
   * Where batches wait to be decoded, with those of other subscribers. @default a queue of this one
   */
  readonly turns?: YieldingQueue | undefined;
}

/** A queue for batches: they take at most a quarter of the time, half a millisecond at once. */
export function kvEventTurns(clock: Clock): YieldingQueue {
  return new YieldingQueue({ clock, sliceMs: 0.5 });
}

/**
 * Follows the KV events that vLLM publishes over ZMQ (`--kv-events-config`), of each instance that
 * names its endpoint in its configuration or at `GET /kv_event_sources` (vLLM 0.33).
 */
export class KvEventSubscriber implements CachedPrefixes {
  readonly #options: FollowOptions;
  readonly #followed = new Map<Instance, FollowedInstance>();
  readonly #tree = new BlockTree();
  #readsTokenIds = false;
  #readsTokenIdsAtMs = Number.NEGATIVE_INFINITY;

  constructor(options: KvEventSubscriberOptions) {
    this.#options = { ...options, turns: options.turns ?? kvEventTurns(options.clock) };
  }

  /**
   * The tokens of a prompt that an instance has cached; undefined for an instance whose events have
   * not come.
   */
  matchedTokens(instance: Instance, tokens: ArrayLike<number>): number | undefined {
    const stream = this.#followed.get(instance)?.stream;
    return stream?.hasStarted === true ? stream.index.matchedTokens(tokens) : undefined;
  }

  /** The instances that may have a begin of a prompt cached, the longest begin first. */
  holders(tokens: ArrayLike<number>): readonly PromptHolders[] {
    return this.#tree.holders(tokens);
  }

  /**
   * Whether an instance publishes its events. Where none does, all are looked at once in a while
   * only.
   */
  get readsTokenIds(): boolean {
    const nowMs = this.#options.clock.now();
    if (nowMs - this.#readsTokenIdsAtMs < LOOK_AGAIN_MS) return this.#readsTokenIds;
    this.#readsTokenIdsAtMs = nowMs;
    this.#readsTokenIds = [...this.#followed.values()].some(
      ({ stream }) => stream?.hasStarted === true,
    );
    return this.#readsTokenIds;
  }

  status(instance: Instance): KvEventStatus | null {
    return this.#followed.get(instance)?.stream?.status() ?? null;
  }

  follow(instances: readonly Instance[]): void {
    for (const instance of instances)
      if (!this.#followed.has(instance))
        this.#followed.set(instance, new FollowedInstance(instance, this.#options, this.#tree));
    const left = new Set(instances);
    for (const [instance, followed] of this.#followed) {
      if (left.has(instance)) continue;
      this.#giveBack(followed.close());
      this.#followed.delete(instance);
      this.#tree.forget(instance);
    }
  }

  close(): void {
    // The memory goes with the subscriber.
    for (const followed of this.#followed.values()) followed.close();
    this.#followed.clear();
  }

  #giveBack(memory: Steps | undefined): void {
    if (memory !== undefined) void this.#options.turns.run(memory);
  }

  [Symbol.dispose](): void {
    this.close();
  }
}

const LOOK_AGAIN_MS = 100;
const ASK_TIMEOUT_MS = 3000;
const ASK_AGAIN_MS = 30_000;
/** By data-parallel rank (vLLM 0.32 and 0.33). */
const sourcesSchema = z.record(
  z.string(),
  z
    .object({
      publisher: z.string().nullish(),
      endpoint: z.string().max(512),
      replay_endpoint: z.string().max(512).nullish(),
    })
    .nullable(),
);

interface FollowOptions extends KvEventSubscriberOptions {
  readonly turns: YieldingQueue;
}

/** One instance: where it publishes, and the stream of its events. */
class FollowedInstance {
  stream: KvEventStream | undefined;
  readonly #instance: Instance;
  readonly #options: FollowOptions;
  readonly #tree: BlockTree;
  #source: KvEventSource | undefined;
  #timer: Timer | undefined;
  #isAsking = false;
  #isClosed = false;
  #warned = false;

  constructor(instance: Instance, options: FollowOptions, tree: BlockTree) {
    this.#instance = instance;
    this.#options = options;
    this.#tree = tree;
    const { kvEvents, kvEventsReplay } = instance;
    if (kvEvents !== undefined) this.#open({ endpoint: kvEvents, replayEndpoint: kvEventsReplay });
    else void this.#ask();
  }

  /** The steps that are returned give the memory of the index back. */
  close(): Steps | undefined {
    this.#isClosed = true;
    this.#timer?.cancel();
    return this.stream?.close();
  }

  #open(source: KvEventSource): void {
    if (this.stream !== undefined) void this.#options.turns.run(this.stream.close());
    this.#source = source;
    const of = { tree: this.#tree, instance: this.#instance };
    this.stream = new KvEventStream(source, of, this.#options, () => void this.#ask());
  }

  /**
   * Asks the instance where it publishes, again until it says so, and after its publisher was lost.
   */
  async #ask(): Promise<void> {
    const { get, clock } = this.#options;
    const { role, url, kvEvents } = this.#instance;
    if (get === undefined || kvEvents !== undefined || this.#isAsking) return;
    this.#isAsking = true;
    this.#timer?.cancel();
    let source: KvEventSource | undefined;
    try {
      const { status, body } = await get({
        role,
        url,
        path: "/kv_event_sources",
        timeoutMs: ASK_TIMEOUT_MS,
      });
      if (status === 200) source = this.#sourceIn(JSON.parse(body));
    } catch {
      // An instance that is not up, or has another answer under this path, publishes nothing.
    }
    this.#isAsking = false;
    if (this.#isClosed) return;
    if (
      source !== undefined &&
      (source.endpoint !== this.#source?.endpoint ||
        source.replayEndpoint !== this.#source.replayEndpoint)
    )
      this.#open(source);
    if (source === undefined) this.#timer = clock.setTimer(() => void this.#ask(), ASK_AGAIN_MS);
  }

  #sourceIn(answer: unknown): KvEventSource | undefined {
    const sources = sourcesSchema.parse(answer);
    const { dataParallelRank: rank, url } = this.#instance;
    const ranks = Object.keys(sources).length;
    if (rank === undefined && ranks > 1) {
      this.#warnOnce(
        `it has ${ranks} data-parallel ranks with a cache each: name each rank as an instance (URL@RANK)`,
      );
      return undefined;
    }
    const found = sources[rank ?? 0];
    if (found == null || found.publisher !== "zmq") return undefined;
    const host = new URL(url).hostname;
    const endpoint = reachable(found.endpoint, host);
    if (endpoint === undefined) this.#warnOnce(`its endpoint ${found.endpoint} is not TCP`);
    return endpoint === undefined
      ? undefined
      : { endpoint, replayEndpoint: reachable(found.replay_endpoint ?? "", host) };
  }

  #warnOnce(reason: string): void {
    if (this.#warned) return;
    this.#warned = true;
    const { log } = this.#options;
    log.warn("kv-events-not-followed", { instance: instanceName(this.#instance), reason });
  }
}

/**
 * An endpoint as this host reaches it: what a server calls all of its addresses, or itself, is the
 * host of its URL.
 */
function reachable(endpoint: string, host: string): string | undefined {
  const own = endpoint.replace(
    /^tcp:\/\/(\*|0\.0\.0\.0|\[::\]|localhost|127\.[\d.]+|\[::1\])(?=:\d+$)/,
    `tcp://${host}`,
  );
  return readTcpEndpoint(own) === undefined ? undefined : own;
}
