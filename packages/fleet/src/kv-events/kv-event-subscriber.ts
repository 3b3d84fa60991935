import { isDeepStrictEqual } from "node:util";
import { type Clock, type Log, type Timer, YieldingQueue } from "@kv/interface";
import { readTcpEndpoint } from "@kv/side-channel";
import { z } from "zod";
import { type Instance, instanceName, type KvEventStatus } from "../instances/instance.js";
import type { InstanceGet } from "../pairing/engine-facts.js";
import { BlockIndex, type Steps } from "./block-index.js";
import { BlockTree, type PromptHolders } from "./block-tree.js";
import { type KvEventSource, KvEventStream } from "./kv-event-stream.js";

/** The prefixes that instances report to have cached. */
export interface CachedPrefixes {
  /**
   * Length of a prompt's cached prefix in tokens; undefined for an instance that reports nothing.
   */
  matchedTokens(instance: Instance, tokens: ArrayLike<number>): number | undefined;
  /**
   * Instances that may have a prefix of the prompt, longest first; they mostly have the shorter
   * ones too.
   */
  holders(tokens: ArrayLike<number>): Iterable<PromptHolders>;
  follow(instances: readonly Instance[]): void;
  /** Whether token ids improve the choice. */
  readonly readsTokenIds?: boolean | undefined;
  status?(instance: Instance): KvEventStatus | null;
  close(): void;
}

/** Options of `KvEventSubscriber`. */
export interface KvEventSubscriberOptions {
  /** Gets a warning about a publisher at most every ten minutes. */
  readonly log: Log;
  readonly clock: Clock;
  /** Asks instances for their endpoint. Without it, only configured endpoints are followed. */
  readonly get?: InstanceGet | undefined;
  /** Where batches wait to be decoded. @default a queue of this subscriber */
  readonly turns?: YieldingQueue | undefined;
}

/** Batches take at most a quarter of the time, half a millisecond at once. */
export function kvEventTurns(clock: Clock): YieldingQueue {
  return new YieldingQueue({ clock, sliceMs: 0.5 });
}

/**
 * Follows vLLM's KV events over ZMQ (`--kv-events-config`). The endpoint comes from the
 * configuration or `GET /kv_event_sources` (vLLM 0.33).
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

  matchedTokens(instance: Instance, tokens: ArrayLike<number>): number | undefined {
    const stream = this.#followed.get(instance)?.stream;
    return stream?.hasStarted === true ? stream.index.matchedTokens(tokens) : undefined;
  }

  holders(tokens: ArrayLike<number>): readonly PromptHolders[] {
    return this.#tree.holders(tokens);
  }

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
      const memory = followed.close();
      if (memory !== undefined) void this.#options.turns.run(memory);
      this.#followed.delete(instance);
      this.#tree.forget(instance);
    }
  }

  close(): void {
    for (const followed of this.#followed.values()) followed.close();
    this.#followed.clear();
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

class FollowedInstance {
  stream: KvEventStream<BlockIndex> | undefined;
  #source: KvEventSource | undefined;
  #timer: Timer | undefined;
  #isAsking = false;
  #isClosed = false;
  #warned = false;

  constructor(
    private readonly instance: Instance,
    private readonly options: FollowOptions,
    private readonly tree: BlockTree,
  ) {
    const { kvEvents, kvEventsReplay } = instance;
    if (kvEvents !== undefined) this.#open({ endpoint: kvEvents, replayEndpoint: kvEventsReplay });
    else void this.#ask();
  }

  close(): Steps | undefined {
    this.#isClosed = true;
    this.#timer?.cancel();
    return this.stream?.close();
  }

  #open(source: KvEventSource): void {
    if (this.stream !== undefined) void this.options.turns.run(this.stream.close());
    this.#source = source;
    const index = new BlockIndex(this.tree, this.instance);
    this.stream = new KvEventStream(source, index, this.options, () => void this.#ask());
  }

  async #ask(): Promise<void> {
    const { get, clock } = this.options;
    const { role, url, kvEvents } = this.instance;
    if (get === undefined || kvEvents !== undefined || this.#isAsking) return;
    this.#isAsking = true;
    this.#timer?.cancel();
    let source: KvEventSource | undefined;
    try {
      const asked = { role, url, path: "/kv_event_sources", timeoutMs: ASK_TIMEOUT_MS };
      const { status, body } = await get(asked);
      if (status === 200) source = this.#sourceIn(JSON.parse(body));
    } catch {
      // The instance is down, or has another use for the path.
    }
    this.#isAsking = false;
    if (this.#isClosed) return;
    if (source === undefined) this.#timer = clock.setTimer(() => void this.#ask(), ASK_AGAIN_MS);
    else if (!isDeepStrictEqual(source, this.#source)) this.#open(source);
  }

  #sourceIn(answer: unknown): KvEventSource | undefined {
    const sources = sourcesSchema.parse(answer);
    const { dataParallelRank: rank, url } = this.instance;
    const ranks = Object.keys(sources).length;
    if (rank === undefined && ranks > 1) {
      this.#warnOnce(
        `it has ${ranks} data-parallel ranks with a cache each: name each rank as an instance (URL@RANK)`,
      );
      return undefined;
    }
    const found = sources[rank ?? 0];
    if (found?.publisher !== "zmq") return undefined;
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
    const { log } = this.options;
    log.warn("kv-events-not-followed", { instance: instanceName(this.instance), reason });
  }
}

/** Replaces a wildcard or loopback address by the host of the instance's URL. */
function reachable(endpoint: string, host: string): string | undefined {
  const own = endpoint.replace(
    /^tcp:\/\/(\*|0\.0\.0\.0|\[::\]|localhost|127\.[\d.]+|\[::1\])(?=:\d+$)/,
    `tcp://${host}`,
  );
  return readTcpEndpoint(own) === undefined ? undefined : own;
}
