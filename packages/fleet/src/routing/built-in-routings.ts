import {
  KvEventSubscriber,
  type KvEventSubscriberOptions,
} from "../kv-events/kv-event-subscriber.js";
import { prefixAware } from "./prefix-aware.js";
import { leastLoad, type Routing, roundRobin } from "./routing.js";
import { sessionAffinity } from "./session-affinity.js";

const CREATE = {
  "round-robin": roundRobin,
  "least-load": leastLoad,
  "session-affinity": sessionAffinity,
  "prefix-aware": (options: KvEventSubscriberOptions) =>
    prefixAware({ cached: new KvEventSubscriber(options) }),
};

/** The name of a built-in routing strategy. */
export type RoutingName = keyof typeof CREATE;

/** The names of the built-in routing strategies. */
export const ROUTING_NAMES = Object.keys(CREATE) as readonly RoutingName[];

/** Makes a built-in strategy. `prefix-aware` subscribes to instances' KV events. */
export function builtInRouting(name: RoutingName, options: KvEventSubscriberOptions): Routing {
  return CREATE[name](options);
}
