import type { ProxySettings } from "../config/settings.js";
import type { Legs } from "../legs/legs.js";
import type { Readback } from "../readback/readback.js";
import { AutoStrategy } from "./auto-strategy.js";
import { ConditionalStrategy } from "./conditional-strategy.js";
import type { DisaggregationStrategy } from "./disaggregation-strategy.js";
import { PrefillEngines, PullStrategy } from "./pull-strategy.js";
import { PushConcurrentStrategy } from "./push-concurrent.js";
import { PushSequentialStrategy } from "./push-sequential.js";
import { ReadbackStrategy } from "./readback-strategy.js";

/** The strategy that the settings `mode`, `pushLegs` and `disaggregateAbove` name. */
export function createStrategy(
  settings: ProxySettings,
  legs: Legs,
  readback: Readback | undefined,
): DisaggregationStrategy {
  const twoLegs = createTwoLegs(settings, legs, readback);
  const { disaggregateAbove: above } = settings;
  // To a sidecar, the request says whether it has two legs.
  return above === undefined || settings.sidecar !== undefined
    ? twoLegs
    : new ConditionalStrategy(legs, twoLegs, above, readback);
}

function createTwoLegs(
  { mode, pushLegs }: ProxySettings,
  legs: Legs,
  readback: Readback | undefined,
): DisaggregationStrategy {
  const engines = new PrefillEngines(legs.fleet.pairing);
  const pull = new PullStrategy(legs, engines);
  if (readback !== undefined) return new ReadbackStrategy(legs, pull, readback, engines);
  if (mode === "pull") return pull;
  const sequential = new PushSequentialStrategy(pull, legs.ambient.random);
  const push =
    pushLegs === "prefill-first"
      ? sequential
      : new PushConcurrentStrategy(legs, engines, sequential);
  return mode === "push" ? push : new AutoStrategy(legs, engines, pull, push);
}
