import { decideDisaggregation, type Instance } from "@kv/fleet";
import type { Part } from "../legs/client-request.js";
import type { Legs } from "../legs/legs.js";
import type { LegAnswer } from "../response/leg-answer.js";
import type { ReadbackStrategy } from "./readback-strategy.js";
import type { DisaggregationStrategy } from "./two-legs.js";

/** Sends a part to D alone where a prefill leg does not pay, else through another strategy. */
export class ConditionalStrategy implements DisaggregationStrategy {
  readonly name: string;
  readonly #decodePrompts = new DecodePrompts();

  /** `aboveTokens`: uncached prompt tokens from which `twoLegs` pays. */
  constructor(
    private readonly legs: Legs,
    private readonly twoLegs: DisaggregationStrategy,
    private readonly aboveTokens: number,
    private readonly readback: ReadbackStrategy | undefined,
  ) {
    this.name = `${twoLegs.name}, above ${aboveTokens} tokens`;
  }

  async run(given: Part): Promise<LegAnswer> {
    const { decoders, prefillers, ambient, fleet } = this.legs;
    const { prefillCosts, kvSources } = fleet;
    const kvHolders = (await kvSources?.holders(given)) ?? [];
    const part = { ...given, kvHolders };
    const decode = decoders.choose(part, part.attempts.decode.avoided);
    if (decode === undefined) return this.twoLegs.run(part);
    const readbackTokens = this.readback === undefined ? 0 : await this.readback.readable(part);
    const nowMs = ambient.clock.now();
    const { charactersPerToken, msPerToken } = prefillCosts;
    const promptTokens = prefillCosts.promptTokens(part.request);
    const decodeCachedTokens = decoders.cachedTokens(decode, part, charactersPerToken) ?? 0;
    const computeMs = (cachedTokens: number, fetchTokens = 0) =>
      msPerToken === undefined || promptTokens === undefined
        ? undefined
        : msPerToken * Math.max(0, promptTokens - cachedTokens) +
          (prefillCosts.fetchMs(fetchTokens) ?? 0);
    const decodeComputeMs = computeMs(decodeCachedTokens);
    const ownTokens = this.#prefillCachedTokens(part);
    const prefillCachedTokens = kvSources?.longest(kvHolders, ownTokens)?.tokens ?? ownTokens;
    const inputs = {
      promptTokens,
      decodeCachedTokens,
      prefillCachedTokens,
      readbackTokens,
      prefillComputeMs:
        readbackTokens > prefillCachedTokens && promptTokens !== undefined
          ? prefillCosts.readingMs(promptTokens, readbackTokens)
          : computeMs(prefillCachedTokens, prefillCachedTokens - ownTokens),
      prefillWaitMs: prefillCosts.waitMs(prefillers),
      decodeComputeMs,
      decodeInFlight: decode.inFlight,
      decodePromptShare: this.#decodePrompts.shareWith(decode, decodeComputeMs ?? 0, nowMs),
    };
    const { twoLegs, reason } = decideDisaggregation(inputs, this.aboveTokens);
    ambient.metrics.count("kv_proxy_disaggregation_total", 1, {
      legs: twoLegs ? "2" : "1",
      reason,
    });
    part.record.disaggregation = { inputs, reason };
    part.preferredDecode = decode;
    if (twoLegs) return this.twoLegs.run(part);
    this.#decodePrompts.add(decode, decodeComputeMs ?? 0, nowMs);
    return this.legs.single(part, "one-leg-pays");
  }

  #prefillCachedTokens(part: Part): number {
    const { prefillers, fleet } = this.legs;
    if (!prefillers.readsTokenIds()) return 0;
    const { charactersPerToken } = fleet.prefillCosts;
    return prefillers
      .list()
      .slice(0, LOOKED_AT)
      .reduce(
        (most, one) => Math.max(most, prefillers.cachedTokens(one, part, charactersPerToken) ?? 0),
        0,
      );
  }
}

/** The most prefill instances whose prefix caches are searched. */
const LOOKED_AT = 64;
/** Prompts count for about this long. */
const WINDOW_MS = 500;

/** Time that decode instances lately spend on prompts they compute themselves. */
class DecodePrompts {
  /** An instance's prompt time as of its last prompt. It fades. */
  readonly #spent = new WeakMap<Instance, { readonly ms: number; readonly atMs: number }>();

  /** Share of the instance's time with one more prompt of `computeMs`. */
  shareWith(instance: Instance, computeMs: number, nowMs: number): number {
    return (this.#spentMs(instance, nowMs) + computeMs) / WINDOW_MS;
  }

  add(instance: Instance, computeMs: number, nowMs: number): void {
    this.#spent.set(instance, { ms: this.#spentMs(instance, nowMs) + computeMs, atMs: nowMs });
  }

  #spentMs(instance: Instance, nowMs: number): number {
    const last = this.#spent.get(instance);
    return last === undefined ? 0 : last.ms * Math.exp((last.atMs - nowMs) / WINDOW_MS);
  }
}
