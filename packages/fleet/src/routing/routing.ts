import type { Instance, KvEventStatus } from "../instances/instance.js";
import type { PooledInstance } from "../instances/pooled-instance.js";
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
  const byTurn = new LeastLoaded(() => 0);
  return { name: "round-robin", choose: (candidates) => byTurn.choose(candidates) };
}

/** Takes the instance with the fewest requests in flight; equals take turns. */
export function leastLoad(): Routing {
  const byLoad = new LeastLoaded();
  return {
    name: "least-load",
    choose: (candidates) => byLoad.choose(candidates),
    loadChanged: (instance) => byLoad.loadChanged(instance),
  };
}

const FORGOTTEN_AFTER = 1000;
const MAX_ORDERS = 16;
const LOOKED_AT = 64;

/**
 * Finds the instances with the fewest requests in flight; of equals, the one chosen longest ago.
 * `loadChanged` keeps lists in order, so that a choice costs the same with any number of instances.
 */
export class LeastLoaded {
  readonly #loadOf: LoadOf;
  readonly #chosenAt = new WeakMap<Instance, number>();
  readonly #orders = new Map<readonly Instance[], LoadOrder>();
  /** Without `loadChanged`, no list can be kept in order. */
  #isTold: boolean;
  #turn = 0;
  #uses = 0;

  /** `constant`: loads that never change. */
  constructor(constant?: LoadOf) {
    this.#isTold = constant !== undefined;
    this.#loadOf = constant ?? (({ inFlight }) => inFlight);
  }

  choose(candidates: readonly Instance[]): Instance | undefined {
    const chosen = this.#orderOf(candidates).first;
    if (chosen !== undefined) this.chosen(chosen);
    return chosen;
  }

  chosen(instance: Instance): void {
    this.#chosenAt.set(instance, ++this.#turn);
    for (const order of this.#orders.values()) order.moved(instance);
  }

  fewest(candidates: readonly Instance[]): number {
    return this.#orderOf(candidates).first?.inFlight ?? Number.POSITIVE_INFINITY;
  }

  inOrder(candidates: readonly Instance[]): Iterable<Instance> {
    return this.#orderOf(candidates);
  }

  has(candidates: readonly Instance[], instance: Instance): boolean {
    return this.#orderOf(candidates).has(instance);
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
    const order = this.#orderOf(candidates);
    const found: Instance[] = [];
    if (holders.size > LOOKED_AT) {
      let looked = 0;
      for (const candidate of order) {
        if (found.length >= count || looked >= LOOKED_AT || candidate.inFlight > most) break;
        looked += 1;
        if (holders.has(candidate)) found.push(candidate);
      }
      if (found.length > 0) return found;
    }
    let looked = 0;
    for (const holder of holders) {
      if (looked >= LOOKED_AT) break;
      looked += 1;
      if (holder.inFlight <= most && order.has(holder)) found.push(holder);
    }
    return found.sort((one, other) => this.#compare(one, other)).slice(0, count);
  }

  loadChanged(instance: Instance): void {
    this.#isTold = true;
    for (const order of this.#orders.values()) order.loadChanged(instance);
  }

  #orderOf(candidates: readonly Instance[]): LoadOrder {
    this.#uses += 1;
    let order = this.#orders.get(candidates);
    if (order === undefined) {
      for (const [list, { usedAt }] of this.#orders)
        if (this.#orders.size >= MAX_ORDERS || this.#uses - usedAt > FORGOTTEN_AFTER)
          this.#orders.delete(list);
      const sorted = [...candidates].sort((one, other) => this.#compare(one, other));
      order = new LoadOrder(sorted, this.#loadOf);
      if (this.#isTold) this.#orders.set(candidates, order);
    }
    order.usedAt = this.#uses;
    return order;
  }

  #compare(one: Instance, other: Instance): number {
    const byLoad = this.#loadOf(one) - this.#loadOf(other);
    return byLoad || (this.#chosenAt.get(one) ?? 0) - (this.#chosenAt.get(other) ?? 0);
  }
}

type LoadOf = (instance: Instance) => number;

/** Circular lists of instances, one for each load. A load mostly moves one list. */
class LoadOrder implements Iterable<Instance> {
  usedAt = 0;
  readonly #loadOf: LoadOf;
  readonly #places = new Map<Instance, Place>();
  /** The begin of each list, by load. */
  readonly #lists: Place[] = [];
  #lowest = 0;

  constructor(sorted: readonly Instance[], loadOf: LoadOf) {
    this.#loadOf = loadOf;
    for (const instance of sorted) {
      const place = new Place(instance);
      this.#places.set(instance, place);
      this.#append(place, loadOf(instance));
    }
  }

  get first(): Instance | undefined {
    while (this.#lowest < this.#lists.length) {
      const found = this.#lists[this.#lowest]?.after.instance;
      if (found !== undefined) return found;
      this.#lowest += 1;
    }
    return undefined;
  }

  has(instance: Instance): boolean {
    return this.#places.has(instance);
  }

  *[Symbol.iterator](): Generator<Instance> {
    for (let load = this.#lowest; load < this.#lists.length; load += 1) {
      let place = this.#lists[load]?.after;
      for (; place?.instance !== undefined; place = place.after) yield place.instance;
    }
  }

  loadChanged(instance: Instance): void {
    const place = this.#places.get(instance);
    const load = this.#loadOf(instance);
    if (place !== undefined && place.load !== load) this.#append(place, load);
  }

  moved(instance: Instance): void {
    const place = this.#places.get(instance);
    if (place !== undefined) this.#append(place, place.load);
  }

  #append(place: Place, load: number): void {
    place.before.after = place.after;
    place.after.before = place.before;
    const begin = this.#lists[load] ?? new Place();
    this.#lists[load] = begin;
    place.load = load;
    place.before = begin.before;
    place.after = begin;
    begin.before.after = place;
    begin.before = place;
    this.#lowest = Math.min(this.#lowest, load);
  }
}

class Place {
  before: Place = this;
  after: Place = this;
  load = 0;

  /** Without an instance, the begin of a list. */
  constructor(readonly instance?: Instance) {}
}
