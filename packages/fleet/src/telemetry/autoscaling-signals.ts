import { MemberList } from "@kv/http";
import type { Ambient } from "@kv/interface";
import type { Instance } from "../instances/instance.js";
import type { Pairing } from "../pairing/pairing.js";
import type { InstancePool, InstancePools } from "../routing/instance-pool.js";
import {
  type EndedPrefill,
  type PrefillCosts,
  uncomputedTokens,
  usageOf,
} from "../routing/prefill-costs.js";

/** What an autoscaler needs, for `/status`. Unknown values are null. */
export interface SignalsStatus {
  readonly prefill_waiting: number;
  /** KV at prefill instances that nobody has read (pull). */
  readonly kv_unread: {
    readonly count: number;
    /** Only of instances with a side channel that was read. */
    readonly bytes: number | null;
    readonly oldest_ms: number;
  };
  readonly decode_in_flight: number | null;
  /** Of the last minutes. */
  readonly prefix_hit_rate: number | null;
  readonly recommended: RecommendedInstances | null;
}

/** How many prefill instances the present decode instances need. */
export interface RecommendedInstances {
  readonly prefill: number;
  readonly decode: number;
  readonly reason: string;
}

interface Work {
  promptTokens: number;
  cachedTokens: number;
  workMs: number;
}

interface Bucket extends Work {
  readonly beganAtMs: number;
}

interface UnreadKv {
  readonly readyAtMs: number;
  readonly bytes: number | undefined;
}

const BUCKET_MS = 10_000;
const BUCKETS = 30;
/** A prefill instance's busy share at which prompts hardly wait. */
const BUSY = 0.8;

/** Options of `AutoscalingSignals`. */
export interface SignalsOptions extends Ambient {
  readonly pools: InstancePools;
  readonly pairing: Pairing | undefined;
  readonly costs: PrefillCosts;
}

/** Measures over five minutes what autoscalers need. */
export class AutoscalingSignals {
  readonly #unread = new MemberList<UnreadKv>();
  readonly #buckets: Bucket[] = [];

  constructor(private readonly options: SignalsOptions) {}

  /** Returns the cached tokens of the prompt; undefined if unknown. */
  prefillEnded(leg: EndedPrefill, expectedCachedTokens = 0): number | undefined {
    const { costs, metrics } = this.options;
    costs.ended(leg);
    const { promptTokens = 0 } = usageOf(leg.usage);
    const known = uncomputedTokens(leg);
    const cachedTokens = known ?? 0;
    // A wait behind other legs was no work for this prompt.
    const estimatedMs = costs.legMs(Math.max(0, promptTokens - cachedTokens)) ?? leg.durationMs;
    const bucket = this.#bucket();
    bucket.promptTokens += promptTokens;
    bucket.cachedTokens += cachedTokens;
    bucket.workMs += Math.min(leg.durationMs, estimatedMs);
    if (promptTokens > 0) metrics.count("kv_proxy_prompt_tokens_total", promptTokens);
    if (cachedTokens > 0) metrics.count("kv_proxy_cached_prompt_tokens_total", cachedTokens);
    if (expectedCachedTokens > 0)
      metrics.count("kv_proxy_expected_cached_prompt_tokens_total", expectedCachedTokens);
    return known;
  }

  #bucket(): Bucket {
    const nowMs = this.options.clock.now();
    const last = this.#buckets.at(-1);
    if (last !== undefined && nowMs < last.beganAtMs + BUCKET_MS) return last;
    const bucket = { beganAtMs: nowMs, promptTokens: 0, cachedTokens: 0, workMs: 0 };
    this.#buckets.push(bucket);
    if (this.#buckets.length > BUCKETS) this.#buckets.shift();
    return bucket;
  }

  /** Returns a function to call when the KV was read or never will be. */
  kvReady(instance: Instance, blockIds: unknown, readyAtMs: number): () => void {
    const bytes = this.options.pairing?.kvBytes(instance, blockIds);
    const unread = this.#unread.join({ readyAtMs, bytes });
    return () => this.#unread.leave(unread);
  }

  status(): SignalsStatus {
    const { prefill, decode } = this.options.pools;
    const loads = (pool: InstancePool) =>
      pool.list().map((one) => ({ inFlight: one.inFlight, available: one.available() }));
    return signalsOf([this.measured()], loads(prefill), loads(decode));
  }

  measured(): MeasuredSignals {
    const nowMs = this.options.clock.now();
    const recent = this.#buckets.filter(({ beganAtMs }) => beganAtMs > nowMs - BUCKETS * BUCKET_MS);
    const sum = (name: keyof Work) => total(recent.map((bucket) => bucket[name]));
    const unread = [...this.#unread.values()];
    const bytes = unread.map((one) => one.bytes).filter((one) => one !== undefined);
    return {
      promptTokens: sum("promptTokens"),
      cachedTokens: sum("cachedTokens"),
      workMs: sum("workMs"),
      windowMs: nowMs - (recent[0]?.beganAtMs ?? nowMs),
      unread: {
        count: unread.length,
        countWithBytes: bytes.length,
        bytes: total(bytes),
        oldestMs: unread.reduce((most, one) => Math.max(most, nowMs - one.readyAtMs), 0),
      },
    };
  }
}

/**
 * One process's measurements of five minutes, which add up over processes. `unread.bytes` are those
 * of `countWithBytes`.
 */
export interface MeasuredSignals extends Readonly<Work> {
  readonly windowMs: number;
  readonly unread: {
    readonly count: number;
    readonly countWithBytes: number;
    readonly bytes: number;
    readonly oldestMs: number;
  };
}

const total = (values: readonly number[]) => values.reduce((all, one) => all + one, 0);

/** The load of an instance. */
export interface InstanceLoad {
  readonly inFlight: number;
  readonly available: boolean;
}

/** `prefillers` and `decoders` have the load from all processes. */
export function signalsOf(
  measured: readonly MeasuredSignals[],
  prefillers: readonly InstanceLoad[],
  decoders: readonly InstanceLoad[],
): SignalsStatus {
  const sum = (name: keyof Work) => total(measured.map((one) => one[name]));
  const unread = (name: keyof MeasuredSignals["unread"]) => measured.map((one) => one.unread[name]);
  const availableOf = (loads: readonly InstanceLoad[]) =>
    loads.filter(({ available }) => available).length;
  const [count, promptTokens] = [total(unread("count")), sum("promptTokens")];
  const available = { prefill: availableOf(prefillers), decode: availableOf(decoders) };
  const decoding = total(decoders.map(({ inFlight }) => inFlight));
  const windowMs = Math.max(0, ...measured.map((one) => one.windowMs));
  return {
    prefill_waiting: total(prefillers.map(({ inFlight }) => Math.max(0, inFlight - 1))),
    kv_unread: {
      count,
      bytes: count > 0 && total(unread("countWithBytes")) === 0 ? null : total(unread("bytes")),
      oldest_ms: Math.max(0, ...unread("oldestMs")),
    },
    decode_in_flight: available.decode === 0 ? null : decoding / available.decode,
    prefix_hit_rate: promptTokens === 0 ? null : sum("cachedTokens") / promptTokens,
    recommended: recommended(sum("workMs"), windowMs, available),
  };
}

/** Little's law: work per second is the number of busy instances. */
function recommended(
  workMs: number,
  windowMs: number,
  available: { readonly prefill: number; readonly decode: number },
): RecommendedInstances | null {
  if (windowMs < BUCKET_MS) return null;
  const busy = workMs / windowMs;
  const prefill = Math.max(1, Math.ceil(busy / BUSY));
  const reason =
    `prompts of the last ${Math.round(windowMs / 1000)} s kept ${busy.toFixed(2)} prefill instances busy; ` +
    `${prefill} are busy for ${Math.round((100 * busy) / prefill)} % of the time, ${available.prefill} are available`;
  return { prefill, decode: available.decode, reason };
}
