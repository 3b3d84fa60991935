import { decideDisaggregation, type Instance } from "@kv/fleet";
import type { Part } from "../legs/client-request.js";
import type { Legs } from "../legs/legs.js";
import type { Readback } from "../readback/readback.js";
import type { LegAnswer } from "../response/leg-answer.js";
import type { DisaggregationStrategy } from "./disaggregation-strategy.js";

/**
 * Sends a part to a decode instance alone where a prefill leg does not pay, else through another
 * strategy.
 */
export class ConditionalStrategy implements DisaggregationStrategy {
  readonly name: string;
  readonly #legs: Legs;
  readonly #twoLegs: DisaggregationStrategy;
  readonly #aboveTokens: number;
  readonly #readback: Readback | undefined;
  readonly #decodePrompts = new DecodePrompts();

  /** `aboveTokens`: from how many uncached tokens of a prompt on `twoLegs` pays. */
  constructor(
    legs: Legs,
    twoLegs: DisaggregationStrategy,
    aboveTokens: number,
    readback: Readback | undefined,
  ) {
    this.name = `${twoLegs.name}, above ${aboveTokens} tokens`;
    this.#legs = legs;
    this.#twoLegs = twoLegs;
    this.#aboveTokens = aboveTokens;
    this.#readback = readback;
  }

  async run(part: Part): Promise<LegAnswer> {
    const { decoders, prefillers, ambient, fleet } = this.#legs;
    const { prefillCosts } = fleet;
    // What an answer says about the prompt comes from the prefill instance.
    const decode =
      part.request.promptFields === "none"
        ? decoders.choose(part, part.attempts.failedDecode)
        : undefined;
    if (decode === undefined) return this.#twoLegs.run(part);
    const readbackTokens = this.#readback === undefined ? 0 : await this.#readback.readable(part);
    const nowMs = ambient.clock.now();
    const { charactersPerToken, msPerToken } = prefillCosts;
    const promptTokens = prefillCosts.promptTokens(part.request);
    const decodeCachedTokens = decoders.cachedTokens(decode, part, charactersPerToken) ?? 0;
    const decodeComputeMs =
      msPerToken === undefined || promptTokens === undefined
        ? undefined
        : msPerToken * Math.max(0, promptTokens - decodeCachedTokens);
    const prefillCachedTokens = this.#prefillCachedTokens(part);
    const inputs = {
      promptTokens,
      decodeCachedTokens,
      prefillCachedTokens,
      readbackTokens,
      prefillComputeMs:
        msPerToken === undefined || promptTokens === undefined
          ? undefined
          : readbackTokens > prefillCachedTokens
            ? prefillCosts.readingMs(promptTokens, readbackTokens)
            : msPerToken * Math.max(0, promptTokens - prefillCachedTokens),
      prefillWaitMs: prefillCosts.waitMs(prefillers),
      decodeComputeMs,
      decodeInFlight: decode.inFlight,
      decodePromptShare: this.#decodePrompts.shareWith(decode, decodeComputeMs ?? 0, nowMs),
    };
    const { twoLegs, reason } = decideDisaggregation(inputs, this.#aboveTokens);
    ambient.metrics.count("kv_proxy_disaggregation_total", 1, {
      legs: twoLegs ? "2" : "1",
      reason,
    });
    part.record.disaggregation = { inputs, reason };
    part.preferredDecode = decode;
    if (twoLegs) return this.#twoLegs.run(part);
    this.#decodePrompts.add(decode, decodeComputeMs ?? 0, nowMs);
    return this.#legs.single(part, "one-leg-pays");
  }

  /** The most tokens of the prompt that a prefill instance has cached. */
  #prefillCachedTokens(part: Part): number {
    const { prefillers, fleet } = this.#legs;
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

/** The most prefill instances whose prefix caches are looked at. */
const LOOKED_AT = 64;
/** Prompts count for about this long. */
const WINDOW_MS = 500;

/** The time that decode instances lately spend on prompts which they compute themselves. */
class DecodePrompts {
  /** Per instance, the time of its prompts, which fades, as of the last one. */
  readonly #spent = new WeakMap<Instance, { readonly ms: number; readonly atMs: number }>();

  /** Share of the instance's time, with one prompt more that takes `computeMs`. */
  shareWith(instance: Instance, computeMs: number, nowMs: number): number {
    return (this.#spentMs(instance, nowMs) + computeMs) / WINDOW_MS;
  }

  /** A prompt went to the instance, which computes it in `computeMs`. */
  add(instance: Instance, computeMs: number, nowMs: number): void {
    this.#spent.set(instance, { ms: this.#spentMs(instance, nowMs) + computeMs, atMs: nowMs });
  }

  #spentMs(instance: Instance, nowMs: number): number {
    const last = this.#spent.get(instance);
    return last === undefined ? 0 : last.ms * Math.exp((last.atMs - nowMs) / WINDOW_MS);
  }
}
