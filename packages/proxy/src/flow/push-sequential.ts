import type { Random } from "@kv/interface";
import { type Part, underUniqueId } from "../legs/client-request.js";
import { KV_REQUEST_PUSH } from "../request/leg-bodies.js";
import type { LegAnswer } from "../response/leg-answer.js";
import type { DisaggregationStrategy } from "./disaggregation-strategy.js";
import type { PullStrategy } from "./pull-strategy.js";

/**
 * The prefill leg, then the decode leg, where the prefill worker WRITEs the KV into the decode
 * worker (vLLM's first push proxy). The legs are those of `PullStrategy`; the KV parameters and the
 * request id differ.
 */
export class PushSequentialStrategy implements DisaggregationStrategy {
  readonly name = "push, prefill first";
  readonly #pull: PullStrategy;
  readonly #random: Random;

  constructor(pull: PullStrategy, random: Random) {
    this.#pull = pull;
    this.#random = random;
  }

  run(part: Part): Promise<LegAnswer> {
    return this.#pull.run(underUniqueId(part, this.#random), KV_REQUEST_PUSH);
  }
}
