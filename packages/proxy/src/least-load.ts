import { type Routing, roundRobin } from "./routing.js";

/** The one with the fewest requests in flight; among equals each in turn. */
export function leastLoad(): Routing {
  const turns = roundRobin();
  return {
    name: "least-load",
    choose(candidates, context) {
      const least = Math.min(...candidates.map(({ inFlight }) => inFlight));
      return turns.choose(
        candidates.filter(({ inFlight }) => inFlight === least),
        context,
      );
    },
  };
}
