import { type Part, underUniqueId } from "../legs/client-request.js";
import type { Legs } from "../legs/legs.js";
import type { LegAnswer } from "../response/leg-answer.js";
import type { DisaggregationStrategy } from "./disaggregation-strategy.js";
import type { PrefillEngines, PullStrategy } from "./pull-strategy.js";

/**
 * The strategy that each prefill instance's connector wants, by the `transfer_mode` of its answers.
 * A fleet may have both kinds. The first request to an instance is sequential under a unique id,
 * which suits both kinds: the decode worker pulls, or registers with what the answer says.
 */
export class AutoStrategy implements DisaggregationStrategy {
  readonly name = "auto";
  readonly #legs: Legs;
  readonly #engines: PrefillEngines;
  readonly #pull: PullStrategy;
  readonly #push: DisaggregationStrategy;

  constructor(
    legs: Legs,
    engines: PrefillEngines,
    pull: PullStrategy,
    push: DisaggregationStrategy,
  ) {
    this.#legs = legs;
    this.#engines = engines;
    this.#pull = pull;
    this.#push = push;
  }

  run(part: Part): Promise<LegAnswer> {
    const instance = this.#legs.prefillers.choose(part, new Set(), {
      avoiding: part.attempts.failedDecode,
    });
    const mode = instance === undefined ? undefined : this.#engines.modeOf(instance);
    const own = { ...part, preferredPrefill: instance ?? part.preferredPrefill };
    if (mode === "pull") return this.#pull.run(own);
    if (mode === "push") return this.#push.run(own);
    return this.#pull.run(underUniqueId(own, this.#legs.ambient.random));
  }
}
