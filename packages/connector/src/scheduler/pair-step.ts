import { KvError, type StepMetadata } from "@kv/interface";
import type { HeartbeatOrder, LeaseOrder, SendableRequest } from "./step-types.js";

/** What the scheduler side of a pair asks of every worker in one step. Plain data: the sides may live in different processes. */
export interface PairStepMetadata extends StepMetadata {
  /** The scheduler's clock when this was built. Other processes' clocks have other origins: workers rebase deadlines by it. */
  readonly schedulerClockMs: number;
  /** Which process the engine is, as its side channel tells our own peers. */
  readonly incarnation: string;
  /** Prefill: requests that run and may be handed to a consumer, which can be done before the step that grants the lease. */
  readonly inBatch: readonly SendableRequest[];
  /** Prefill: of those, the ones that ended without anything to send. */
  readonly notSent: readonly string[];
  /** Prefill: requests that finished; their blocks wait for their consumers. */
  readonly leases: readonly LeaseOrder[];
  /** Decode: leases to keep alive, whole; null when nothing changed since the last step. */
  readonly heartbeats: readonly HeartbeatOrder[] | null;
}

/**
 * Narrows what the engine passed on; `lists` are the connector's own besides. Errors: `KV_INTERNAL` for another connector's metadata,
 * which only a wiring mistake brings here.
 */
export function pairStepMetadata<Step extends PairStepMetadata>(
  step: StepMetadata,
  connector: string,
  lists: readonly (keyof Step & string)[],
): Step {
  const { schedulerClockMs, incarnation, heartbeats } = step;
  if (
    step.connector !== connector ||
    !["inBatch", "notSent", "leases", ...lists].every((name) => Array.isArray(step[name])) ||
    typeof schedulerClockMs !== "number" ||
    typeof incarnation !== "string" ||
    !(heartbeats === null || Array.isArray(heartbeats))
  ) {
    throw new KvError(
      "KV_INTERNAL",
      `step ${step.step} carries metadata of connector "${step.connector}"; this worker is of "${connector}"`,
      { hint: "build the scheduler side and the worker side from the same connector name" },
    );
  }
  return step as Step;
}
