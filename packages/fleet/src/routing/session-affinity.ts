import { createHash } from "node:crypto";
import { type Instance, instanceName } from "../instances/instance.js";
import { getOrAdd } from "../instances/pooled-instance.js";
import { mixed } from "../kv-events/hash-table.js";
import { LeastLoaded, type Routing, type RoutingContext } from "./routing.js";

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
  const byLoad = new LeastLoaded();
  const rings = new WeakMap<readonly Instance[], Ring>();
  let all: readonly Instance[] = [];
  return {
    name: "session-affinity",
    choose(candidates, context) {
      const session = sessionOf(context);
      if (session === undefined) return byLoad.choose(candidates);
      // A retry leaves an instance out. A ring for each such list would take milliseconds.
      const placed = candidates.length < all.length ? all : candidates;
      const ring = getOrAdd(rings, placed, () => new Ring(placed));
      const point = hashOf(session);
      const nearest = ring.nearest(point);
      return candidates.includes(nearest) ? nearest : ring.nearest(point, candidates);
    },
    instancesChanged(instances) {
      all = instances;
      byLoad.instancesChanged(instances);
    },
    loadChanged: (instance) => byLoad.loadChanged(instance),
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

  /** @param among Some of the ring's instances. */
  nearest(session: number, among?: readonly Instance[]): Instance {
    const places = this.#places;
    const instanceAt = (at: number) => this.#sorted[at % places.length] as Instance;
    const isOut = (at: number) => among?.includes(instanceAt(at)) === false;
    let nearest = 0;
    let distance = Number.POSITIVE_INFINITY;
    for (let probe = 0; probe < PROBES; probe += 1) {
      const point = mixed(session + Math.imul(probe, 0x9e3779b9));
      // Places are spread evenly, so the first one after a point is near its share of the ring.
      let at = Math.floor((point / 2 ** 32) * places.length);
      while (at > 0 && (places[at - 1] ?? 0) >= point) at -= 1;
      while (at < places.length && (places[at] ?? 0) < point) at += 1;
      for (let passed = 0; passed < places.length && isOut(at); passed += 1) at += 1;
      const after = ((places[at % places.length] ?? 0) - point) >>> 0;
      if (after >= distance) continue;
      distance = after;
      nearest = at;
    }
    return instanceAt(nearest);
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
