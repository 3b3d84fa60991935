import type { Part } from "../legs/client-request.js";
import type { LegAnswer } from "../response/leg-answer.js";

/** The order of a part's prefill and decode leg, and the KV parameters that each leg carries. */
export interface DisaggregationStrategy {
  /** Shown as `flow` on status pages. */
  readonly name: string;
  /**
   * Runs the legs of a part until the decode leg's answer begins. The caller ends the visit of the
   * answer. A part that ends otherwise (error, abort) leaves no blocks held at the prefill worker
   * that could be freed.
   * @throws The errors of the legs, and the deadline's reason.
   */
  run(part: Part): Promise<LegAnswer>;
}
