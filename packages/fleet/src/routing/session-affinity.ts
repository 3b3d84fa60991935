import { createHash } from "node:crypto";
import { type Instance, instanceName } from "../instances/instance.js";
import { mixed } from "../kv-events/hash-table.js";
import { leastLoad, type Routing, type RoutingContext } from "./routing.js";

/**
 * Ring points per session, of which the nearest to an instance counts. With one point, some
 * instances had several times the sessions of others.
 */
const PROBES = 21;

/**
 * Sends each session to one instance by consistent hashing, so that a change of instances moves
 * few. The session is the header `X-Session-Id`, else `session_id` or `user` in the body. Other
 * requests go to the least loaded instance.
 */
export function sessionAffinity(): Routing {
  const withoutSession = leastLoad();
  const rings = new WeakMap<readonly Instance[], Ring>();
  return {
    name: "session-affinity",
    choose(candidates, context) {
      const session = sessionOf(context);
      if (session === undefined) return withoutSession.choose(candidates, context);
      let ring = rings.get(candidates);
      if (ring === undefined) {
        ring = new Ring(candidates);
        rings.set(candidates, ring);
      }
      return ring.instanceOf(hashOf(session));
    },
    loadChanged: (instance) => withoutSession.loadChanged?.(instance),
  };
}

/** Instances at the hashes of their names, on a ring of 32-bit numbers. */
class Ring {
  readonly #sorted: readonly Instance[];
  readonly #places: Uint32Array;

  constructor(instances: readonly Instance[]) {
    const placed = instances
      .map((instance) => ({ instance, place: hashOf(instanceName(instance)) }))
      .sort((one, other) => one.place - other.place);
    this.#sorted = placed.map(({ instance }) => instance);
    this.#places = Uint32Array.from(placed, ({ place }) => place);
  }

  instanceOf(session: number): Instance | undefined {
    const places = this.#places;
    let nearest = 0;
    let distance = Number.POSITIVE_INFINITY;
    for (let probe = 0; probe < PROBES; probe += 1) {
      const point = mixed(session + Math.imul(probe, 0x9e3779b9));
      // Places are spread evenly, so the first one after a point is near its share of the ring.
      let at = Math.floor((point / 2 ** 32) * places.length);
      while (at > 0 && (places[at - 1] ?? 0) >= point) at -= 1;
      while (at < places.length && (places[at] ?? 0) < point) at += 1;
      if (at === places.length) at = 0;
      const after = ((places[at] ?? 0) - point) >>> 0;
      if (after >= distance) continue;
      distance = after;
      nearest = at;
    }
    return this.#sorted[nearest];
  }
}

function hashOf(text: string): number {
  return createHash("sha1").update(text).digest().readUInt32LE();
}

function sessionOf({ headers, request }: RoutingContext): string | undefined {
  const { session_id: id, user } = request?.fields ?? {};
  return [headers?.["x-session-id"], id, user].find(
    (value): value is string => typeof value === "string" && value !== "",
  );
}
