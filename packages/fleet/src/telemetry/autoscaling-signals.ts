import type { Clock } from "@kv/interface";
import type { Instance } from "../instances/instance.js";
import type { InstancePool } from "../instances/instance-pool.js";
import type { Pairing } from "../pairing/pairing.js";

/** What an autoscaler needs to know, as JSON for `/status`. A value that is not known is null. */
export interface SignalsStatus {
  /** Prefill legs behind another one at their instance. */
  readonly prefill_waiting: number;
  /** KV that is ready at prefill instances and that no decode instance has read (pull). */
  readonly kv_unread: {
    /** Parts of requests. */
    readonly count: number;
    /** Bytes, of the instances whose side channel was read. */
    readonly bytes: number | null;
    /** Age of the oldest, in milliseconds. */
    readonly oldest_ms: number;
  };
  /** Requests in flight for each available decode instance. */
  readonly decode_in_flight: number | null;
  /** Share of the prompts' tokens of the last minutes that prefill instances had cached. */
  readonly prefix_hit_rate: number | null;
  /** How many instances the prompts of the last minutes need; null where none was measured. */
  readonly recommended: RecommendedInstances | null;
}

/** How many prefill instances the present decode instances need. */
export interface RecommendedInstances {
  /** Prefill instances. */
  readonly prefill: number;
  /** Decode instances: those that are available. */
  readonly decode: number;
  /** The measurement behind it. */
  readonly reason: string;
}

interface Bucket {
  readonly beganAtMs: number;
  promptTokens: number;
  cachedTokens: number;
  /** Time that prefill instances computed. */
  workMs: number;
}

interface UnreadKv {
  readonly readyAtMs: number;
  readonly bytes: number | undefined;
}

const BUCKET_MS = 10_000;
const BUCKETS = 30;
/** A prefill instance is to be busy for this share of the time, so that prompts hardly wait. */
const BUSY = 0.8;

export interface SignalsOptions {
  readonly prefillers: InstancePool;
  readonly decoders: InstancePool;
  /** Knows the lengths of blocks. */
  readonly pairing: Pairing | undefined;
  readonly clock: Clock;
}

/** Measures what autoscalers of prefill and decode instances need, over the last five minutes. */
export class AutoscalingSignals {
  readonly #options: SignalsOptions;
  readonly #unread = new Set<UnreadKv>();
  readonly #buckets: Bucket[] = [];

  constructor(options: SignalsOptions) {
    this.#options = options;
  }

  /** A prompt is computed. `workMs`: what it took of the instance's time. */
  prefilled(promptTokens: number, cachedTokens: number, workMs: number): void {
    const nowMs = this.#options.clock.now();
    let bucket = this.#buckets.at(-1);
    if (bucket === undefined || nowMs >= bucket.beganAtMs + BUCKET_MS) {
      bucket = { beganAtMs: nowMs, promptTokens: 0, cachedTokens: 0, workMs: 0 };
      this.#buckets.push(bucket);
      if (this.#buckets.length > BUCKETS) this.#buckets.shift();
    }
    bucket.promptTokens += promptTokens;
    bucket.cachedTokens += cachedTokens;
    bucket.workMs += workMs;
  }

  /** The KV of a part is ready at a prefill instance. Returns a function that says that it was read, or will not be. */
  kvReady(instance: Instance, blockIds: unknown, readyAtMs: number): () => void {
    const unread = { readyAtMs, bytes: this.#options.pairing?.kvBytes(instance, blockIds) };
    this.#unread.add(unread);
    return () => void this.#unread.delete(unread);
  }

  /** The present values. */
  status(): SignalsStatus {
    const { prefillers, decoders, clock } = this.#options;
    const nowMs = clock.now();
    const waiting = prefillers.list().map(({ inFlight }) => Math.max(0, inFlight - 1));
    const unread = [...this.#unread];
    const known = unread.flatMap(({ bytes }) => bytes ?? []);
    const available = decoders.list().filter((instance) => instance.available());
    const decoding = decoders.list().reduce((sum, { inFlight }) => sum + inFlight, 0);
    const recent = this.#buckets.filter(({ beganAtMs }) => beganAtMs > nowMs - BUCKETS * BUCKET_MS);
    const sum = (name: "promptTokens" | "cachedTokens" | "workMs") =>
      recent.reduce((all, bucket) => all + bucket[name], 0);
    const promptTokens = sum("promptTokens");
    return {
      prefill_waiting: waiting.reduce((all, count) => all + count, 0),
      kv_unread: {
        count: unread.length,
        bytes: unread.length > 0 && known.length === 0 ? null : known.reduce((all, bytes) => all + bytes, 0),
        oldest_ms: unread.reduce((oldest, { readyAtMs }) => Math.max(oldest, nowMs - readyAtMs), 0),
      },
      decode_in_flight: available.length === 0 ? null : decoding / available.length,
      prefix_hit_rate: promptTokens === 0 ? null : sum("cachedTokens") / promptTokens,
      recommended: this.#recommended(
        sum("workMs"),
        nowMs - (recent[0]?.beganAtMs ?? nowMs),
        available.length,
      ),
    };
  }

  /** Little's law: the time that prompts take of each second is the number of instances that are busy with them. */
  #recommended(workMs: number, windowMs: number, decode: number): RecommendedInstances | null {
    if (windowMs < BUCKET_MS) return null;
    const busy = workMs / windowMs;
    const prefill = Math.max(1, Math.ceil(busy / BUSY));
    const now = this.#options.prefillers.available();
    const reason =
      `prompts of the last ${Math.round(windowMs / 1000)} s kept ${busy.toFixed(2)} prefill instances busy; ` +
      `${prefill} are busy for ${Math.round((100 * busy) / prefill)} % of the time, ${now} are available`;
    return { prefill, decode, reason };
  }
}
