import { createHash } from "node:crypto";
import { type Instance, instanceName } from "../instances/instance.js";
import { leastLoad, type Routing, type RoutingContext } from "./routing.js";

/**
 * Points of a session on the ring, of which the one nearest to an instance counts: with one, some
 * instances had several times the sessions of others.
 */
const PROBES = 21;

/**
 * Sends the requests of a session to one instance by consistent hashing: an instance that comes or
 * goes moves only its own sessions. The session is the header `X-Session-Id`, else `session_id` or
 * `user` in the body. A request without one goes to the least loaded instance.
 */
export function sessionAffinity(): Routing {
  const withoutSession = leastLoad();
  const hashes = new WeakMap<Instance, number>();
  /** By candidates, which are the same list while no instance changes. */
  const rings = new WeakMap<readonly Instance[], Ring>();
  return {
    name: "session-affinity",
    choose(candidates, context) {
      const session = sessionOf(context);
      if (session === undefined) return withoutSession.choose(candidates, context);
      let ring = rings.get(candidates);
      if (ring === undefined) {
        ring = new Ring(candidates, hashes);
        rings.set(candidates, ring);
      }
      return ring.instanceOf(hashOf(session));
    },
    loadChanged: (instance) => withoutSession.loadChanged?.(instance),
  };
}

/** Instances on a ring of 32-bit numbers, each at the hash of its name. */
class Ring {
  readonly #sorted: readonly Instance[];
  readonly #places: Uint32Array;
  /** By the first bits of a place, the first instance there or behind. */
  readonly #starts: Uint32Array;
  readonly #shift: number;

  constructor(instances: readonly Instance[], hashes: WeakMap<Instance, number>) {
    const placeOf = (instance: Instance) => {
      let place = hashes.get(instance);
      if (place === undefined) {
        place = hashOf(instanceName(instance));
        hashes.set(instance, place);
      }
      return place;
    };
    this.#sorted = [...instances].sort((one, other) => placeOf(one) - placeOf(other));
    this.#places = Uint32Array.from(this.#sorted, placeOf);
    const bits = Math.min(24, Math.ceil(Math.log2(instances.length + 1)));
    this.#shift = 32 - bits;
    this.#starts = new Uint32Array(2 ** bits);
    let next = 0;
    for (let start = 0; start < this.#starts.length; start += 1) {
      while (next < this.#places.length && (this.#places[next] ?? 0) >>> this.#shift < start)
        next += 1;
      this.#starts[start] = next;
    }
  }

  instanceOf(session: number): Instance | undefined {
    const places = this.#places;
    let nearest = 0;
    let distance = Number.POSITIVE_INFINITY;
    for (let probe = 0; probe < PROBES; probe += 1) {
      const point = mixed(session, Math.imul(probe, 0x9e3779b9));
      let at = this.#starts[this.#shift === 32 ? 0 : point >>> this.#shift] ?? 0;
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

/** A number of 32 bits that depends on every bit of both. */
function mixed(one: number, other: number): number {
  let mixing = Math.imul(one ^ (one >>> 16), 0x85ebca6b) ^ other;
  mixing = Math.imul(mixing ^ (mixing >>> 13), 0xc2b2ae35);
  mixing = Math.imul(mixing ^ (mixing >>> 16), 0x9e3779b1);
  return (mixing ^ (mixing >>> 15)) >>> 0;
}

function sessionOf({ headers, request }: RoutingContext): string | undefined {
  const { session_id: id, user } = request?.fields ?? {};
  return [headers?.["x-session-id"], id, user].find(
    (value): value is string => typeof value === "string" && value !== "",
  );
}
