import { decideDisaggregation } from "@kv/fleet";
import type { LegAnswer } from "../response/leg-answer.js";
import type { Part } from "./client-request.js";
import type { DisaggregationStrategy } from "./disaggregation-strategy.js";
import type { Legs } from "./legs.js";

/** Sends a part to a decode instance alone where a prefill leg does not pay, else through another strategy. */
export class ConditionalStrategy implements DisaggregationStrategy {
  readonly name: string;
  readonly #legs: Legs;
  readonly #twoLegs: DisaggregationStrategy;
  readonly #aboveTokens: number;

  /** `aboveTokens`: from how many uncached tokens of a prompt on `twoLegs` pays. */
  constructor(legs: Legs, twoLegs: DisaggregationStrategy, aboveTokens: number) {
    this.name = `${twoLegs.name}, above ${aboveTokens} tokens`;
    this.#legs = legs;
    this.#twoLegs = twoLegs;
    this.#aboveTokens = aboveTokens;
  }

  run(part: Part): Promise<LegAnswer> {
    const { decoders, prefillers, prefillCosts, ambient } = this.#legs;
    // What an answer says about the prompt comes from the prefill instance.
    const decode = part.request.promptFields === "none" ? decoders.choose(part, new Set()) : undefined;
    if (decode === undefined) return this.#twoLegs.run(part);
    const { charactersPerToken, msPerToken } = prefillCosts;
    const promptTokens = prefillCosts.promptTokens(part.request);
    const decodeCachedTokens = decoders.cachedTokens(decode, part, charactersPerToken) ?? 0;
    const inputs = {
      promptTokens,
      decodeCachedTokens,
      prefillWaitMs: prefillCosts.waitMs(prefillers),
      decodeComputeMs:
        msPerToken === undefined || promptTokens === undefined
          ? undefined
          : msPerToken * Math.max(0, promptTokens - decodeCachedTokens),
      decodeInFlight: decode.inFlight,
    };
    const { twoLegs, reason } = decideDisaggregation(inputs, this.#aboveTokens);
    ambient.metrics.count("kv_proxy_disaggregation_total", 1, { legs: twoLegs ? "2" : "1", reason });
    part.record.disaggregation = { ...inputs, reason };
    const own = { ...part, preferredDecode: decode };
    return twoLegs ? this.#twoLegs.run(own) : this.#legs.decodeOnly(own);
  }
}
