import type { Log } from "@kv/interface";
import { followKvEvents } from "./kv-event-feed.js";
import { leastLoad } from "./least-load.js";
import type { RoutingName } from "./options.js";
import { prefixAware } from "./prefix-aware.js";
import { type Routing, roundRobin } from "./routing.js";
import { sessionAffinity } from "./session-affinity.js";

/** The built-in strategies. Another is a `Routing` of yours, handed to `createProxy` as `createRouting`. */
const ROUTINGS: Readonly<Record<RoutingName, (log: Log) => Routing>> = {
  "round-robin": () => roundRobin(),
  "least-load": () => leastLoad(),
  "session-affinity": () => sessionAffinity(),
  "prefix-aware": (log) => prefixAware({ cached: followKvEvents(log) }),
};

export function routingByName(name: RoutingName, log: Log): Routing {
  return ROUTINGS[name](log);
}
