import {
  KvEventSubscriber,
  type KvEventSubscriberOptions,
} from "../kv-events/kv-event-subscriber.js";
import { prefixAware } from "./prefix-aware.js";
import { leastLoad, type Routing, roundRobin } from "./routing.js";
import { sessionAffinity } from "./session-affinity.js";

/** The names of the built-in routing strategies. */
export const ROUTING_NAMES = [
  "round-robin",
  "least-load",
  "session-affinity",
  "prefix-aware",
] as const;

/** The name of a built-in routing strategy. */
export type RoutingName = (typeof ROUTING_NAMES)[number];

const CREATE: Readonly<Record<RoutingName, (options: KvEventSubscriberOptions) => Routing>> = {
  "round-robin": () => roundRobin(),
  "least-load": () => leastLoad(),
  "session-affinity": () => sessionAffinity(),
  "prefix-aware": (options) => prefixAware({ cached: new KvEventSubscriber(options) }),
};

/** Makes a built-in strategy. `prefix-aware` subscribes to instances' KV events. */
export function builtInRouting(name: RoutingName, options: KvEventSubscriberOptions): Routing {
  return CREATE[name](options);
}
