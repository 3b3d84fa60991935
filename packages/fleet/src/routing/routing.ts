import type { Instance, KvEventStatus } from "../instances/instance.js";
import { getOrAdd, type PooledInstance } from "../instances/pooled-instance.js";
import type { Holders } from "../kv-events/block-tree.js";
import type { RoutedRequest } from "../request/generation-request.js";

/** The request that an instance is chosen for. */
export interface RoutingContext {
  /** Unique among those in flight. */
  readonly requestId: string;
  /** Absent where any instance can answer, as for `/v1/models`. */
  readonly request?: RoutedRequest | undefined;
  readonly headers?: Readonly<Record<string, string | readonly string[] | undefined>> | undefined;
  /**
   * Only these may serve the prefill leg. The first available one is taken without the strategy.
   */
  readonly prefillers?: readonly PooledInstance[] | undefined;
  /** Taken without the strategy while it is a candidate. */
  readonly preferredPrefill?: Instance | undefined;
  /** Taken without the strategy while it is a candidate. */
  readonly preferredDecode?: Instance | undefined;
}

/** A strategy that chooses instances. Each role has its own, as most keep state. */
export interface Routing {
  /** For status pages and errors. */
  readonly name: string;
  /** `candidates` are never empty and in pool order. Undefined refuses the request. */
  choose(candidates: readonly Instance[], context: RoutingContext): Instance | undefined;
  /**
   * Tokens of the prompt's prefix that an instance has cached: exact for token ids with KV events,
   * else estimated with `charactersPerToken`; 0 if unknown.
   */
  cachedTokens?(instance: Instance, context: RoutingContext, charactersPerToken: number): number;
  /** Whether a chat's token ids would improve the choice. */
  readsTokenIds?(): boolean;
  /** Null without KV events. */
  kvEvents?(instance: Instance): KvEventStatus | null;
  instancesChanged?(instances: readonly Instance[]): void;
  /** Called when an instance's `inFlight` changes. Without it, strategies compare all loads. */
  loadChanged?(instance: Instance): void;
  close?(): void;
}

/** Takes each instance in turn. Turns stay even while instances are left out. */
export function roundRobin(): Routing {
  return new LeastLoaded("round-robin", () => 0);
}

/** Takes the instance with the fewest requests in flight; equals take turns. */
export function leastLoad(): Routing {
  return new LeastLoaded();
}

const LOOKED_AT = 64;

/** In a circular list of one load. Without an instance, its begin. */
class Place {
  before: Place = this;
  after: Place = this;
  load = 0;
  turn = 0;

  constructor(readonly instance?: Instance) {}
}

/**
 * Finds the instances with the fewest requests in flight; of equals, the one whose load changed or
 * that was chosen longest ago. `loadChanged` keeps them in order, so that a choice costs the same
 * with any number of instances.
 */
export class LeastLoaded implements Routing {
  readonly name: string;
  readonly #loadOf: (instance: Instance) => number;
  /** Without `loadChanged`, all loads are compared at each choice. */
  #isTold: boolean;
  /** The begin of each list. A `Set` would be slower, since its iterators pass what has left. */
  readonly #byLoad: Place[] = [];
  #lowest = 0;
  readonly #places = new Map<Instance, Place>();
  readonly #members = new WeakMap<readonly Instance[], ReadonlySet<Instance>>();
  #changed: readonly Instance[] | undefined;
  #turn = 0;

  /** `constant`: loads that never change. */
  constructor(name = "least-load", constant?: (instance: Instance) => number) {
    this.name = name;
    this.#isTold = constant !== undefined;
    this.#loadOf = constant ?? (({ inFlight }) => inFlight);
  }

  choose(candidates: readonly Instance[]): Instance | undefined {
    const [chosen] = this.inOrder(candidates);
    if (chosen !== undefined) this.chosen(chosen);
    return chosen;
  }

  chosen(instance: Instance): void {
    const place = this.#places.get(instance);
    if (place !== undefined) this.#append(place, place.load);
  }

  fewest(candidates: readonly Instance[]): number {
    const [first] = this.inOrder(candidates);
    return first?.inFlight ?? Number.POSITIVE_INFINITY;
  }

  *inOrder(candidates: readonly Instance[]): Generator<Instance> {
    const members = this.#membersOf(candidates);
    for (let load = this.#lowest; load < this.#byLoad.length; load += 1) {
      let place = this.#byLoad[load]?.after;
      if (place?.instance === undefined && load === this.#lowest) this.#lowest += 1;
      for (; place?.instance !== undefined; place = place.after)
        if (members.has(place.instance)) yield place.instance;
    }
  }

  /**
   * At most `count` holders with at most `most` requests in flight, least loaded first. Of many
   * holders it finds those among the least loaded candidates, else some.
   */
  holders(
    candidates: readonly Instance[],
    holders: Holders,
    most: number,
    count: number,
  ): Instance[] {
    const found: Instance[] = [];
    let looked = 0;
    if (holders.size > LOOKED_AT)
      for (const candidate of this.inOrder(candidates)) {
        if (found.length >= count || looked >= LOOKED_AT || candidate.inFlight > most) break;
        looked += 1;
        if (holders.has(candidate)) found.push(candidate);
      }
    if (found.length > 0) return found;
    const members = this.#membersOf(candidates);
    looked = 0;
    for (const holder of holders) {
      if (looked >= LOOKED_AT) break;
      looked += 1;
      if (holder.inFlight <= most && members.has(holder)) found.push(holder);
    }
    const turnOf = (one: Instance) => this.#places.get(one)?.turn ?? 0;
    return found
      .sort((one, other) => one.inFlight - other.inFlight || turnOf(one) - turnOf(other))
      .slice(0, count);
  }

  loadChanged(instance: Instance): void {
    this.#isTold = true;
    this.#refresh(instance);
  }

  instancesChanged(instances: readonly Instance[]): void {
    this.#changed = instances;
  }

  /** At the next choice, since a pool begins with one change for each instance. */
  #follow(instances: readonly Instance[]): void {
    this.#changed = undefined;
    const left = new Set(instances);
    for (const [instance, place] of this.#places) {
      if (left.has(instance)) continue;
      this.#places.delete(instance);
      this.#unlink(place);
    }
    this.#add(left);
  }

  #membersOf(candidates: readonly Instance[]): ReadonlySet<Instance> {
    if (this.#changed !== undefined) this.#follow(this.#changed);
    const members = getOrAdd(this.#members, candidates, () => this.#add(new Set(candidates)));
    if (!this.#isTold) for (const one of members) this.#refresh(one);
    return members;
  }

  #add(instances: ReadonlySet<Instance>): ReadonlySet<Instance> {
    for (const one of instances) {
      if (this.#places.has(one)) continue;
      const place = new Place(one);
      this.#places.set(one, place);
      this.#append(place, this.#loadOf(one));
    }
    return instances;
  }

  #refresh(instance: Instance): void {
    const place = this.#places.get(instance);
    const load = this.#loadOf(instance);
    if (place !== undefined && place.load !== load) this.#append(place, load);
  }

  #append(place: Place, load: number): void {
    this.#unlink(place);
    const begin = this.#byLoad[load] ?? new Place();
    this.#byLoad[load] = begin;
    place.load = load;
    place.turn = ++this.#turn;
    place.before = begin.before;
    place.after = begin;
    begin.before.after = place;
    begin.before = place;
    this.#lowest = Math.min(this.#lowest, load);
  }

  #unlink({ before, after }: Place): void {
    before.after = after;
    after.before = before;
  }
}
