import type { Instance, KvEventStatus } from "../instances/instance.js";
import type { PooledInstance } from "../instances/pooled-instance.js";
import type { Holders } from "../kv-events/block-tree.js";
import type { RoutedRequest } from "../request/generation-request.js";

/** The request that an instance is chosen for. */
export interface RoutingContext {
  /** The request's id, unique among those in flight. */
  readonly requestId: string;
  /** The client's request; absent where any instance can answer, as for `/v1/models`. */
  readonly request?: RoutedRequest | undefined;
  readonly headers?: Readonly<Record<string, string | readonly string[] | undefined>> | undefined;
  /**
   * Only these may serve its prefill leg. The first one that is available is chosen, without the
   * strategy.
   */
  readonly prefillers?: readonly PooledInstance[] | undefined;
  /** Chosen for prefill while it is among the candidates; the strategy is not called then. */
  readonly preferredPrefill?: Instance | undefined;
  /** Chosen for decode while it is among the candidates; the strategy is not called then. */
  readonly preferredDecode?: Instance | undefined;
}

/**
 * A strategy that chooses among instances. Each role has one of its own, as most strategies keep
 * state.
 */
export interface Routing {
  /** The strategy's name on status pages and in errors. */
  readonly name: string;
  /**
   * Chooses one of `candidates`, which are never empty and in the order of the pool; undefined
   * refuses the request.
   */
  choose(candidates: readonly Instance[], context: RoutingContext): Instance | undefined;
  /**
   * How many tokens of the request's prompt, from its first, an instance has in its prefix cache,
   * as far as the strategy knows: exact for token ids and instances that publish KV events, else
   * estimated with `charactersPerToken`. 0 where nothing is known.
   */
  cachedTokens?(instance: Instance, context: RoutingContext, charactersPerToken: number): number;
  /**
   * Whether the strategy would choose better with the token ids of a chat
   * (`RoutedRequest.tokenIds`).
   */
  readsTokenIds?(): boolean;
  /**
   * How much the strategy knows of an instance's prefix cache by its KV events; null for an
   * instance that publishes none.
   */
  kvEvents?(instance: Instance): KvEventStatus | null;
  instancesChanged?(instances: readonly Instance[]): void;
  /**
   * Called after each change of an instance's `inFlight`. Without these calls, strategies look at
   * the load of each candidate.
   */
  loadChanged?(instance: Instance): void;
  close?(): void;
}

/** Each instance in turn. */
export function roundRobin(): Routing {
  const chosenAt = new WeakMap<Instance, number>();
  let turn = 0;
  /**
   * By candidates, which are the same list while no instance changes: whose turn it is in it.
   * Instances of two versions are two lists.
   */
  const turns = new WeakMap<readonly Instance[], number>();
  // The one that was not chosen for the longest time, so that turns stay even while some are left
  // out.
  const earliest = (candidates: readonly Instance[]) => {
    let found = 0;
    let earliestTurn = Number.POSITIVE_INFINITY;
    for (const [at, candidate] of candidates.entries()) {
      const chosenTurn = chosenAt.get(candidate) ?? 0;
      if (chosenTurn >= earliestTurn) continue;
      found = at;
      earliestTurn = chosenTurn;
    }
    return found;
  };
  return {
    name: "round-robin",
    choose(candidates) {
      const { length } = candidates;
      const turnOf = (at: number) => chosenAt.get(candidates[at % length] as Instance) ?? 0;
      let at = turns.get(candidates) ?? earliest(candidates);
      // Those that were chosen from another list meanwhile are passed over.
      for (let left = length; left > 1 && turnOf(at) > turnOf(at + 1); left -= 1) at += 1;
      at %= length;
      const chosen = candidates[at];
      if (chosen !== undefined) chosenAt.set(chosen, ++turn);
      turns.set(candidates, at + 1);
      return chosen;
    },
  };
}

/** The instance with the fewest requests in flight; among equals each in turn. */
export function leastLoad(): Routing {
  const byLoad = new LeastLoaded();
  return {
    name: "least-load",
    choose: (candidates) => byLoad.choose(candidates),
    loadChanged: (instance) => byLoad.loadChanged(instance),
  };
}

/** A list is forgotten after this many uses of other lists. */
const FORGOTTEN_AFTER = 1000;
/** The most lists that are kept in order. */
const MAX_ORDERS = 16;
/** The most holders of a prefix that one choice compares. */
const LOOKED_AT = 64;

/**
 * Finds the instances with the fewest requests in flight; among equals those that were not chosen
 * for the longest time. Pools give the same list while no instance changes: such a list is kept in
 * order by `loadChanged`, so that a choice costs the same with any number of instances. A list that
 * comes once is looked through.
 */
export class LeastLoaded {
  readonly #chosenAt = new WeakMap<Instance, number>();
  readonly #orders = new Map<readonly Instance[], LoadOrder>();
  readonly #seen = new WeakSet<readonly Instance[]>();
  /** The candidates that were asked for last, of those that are not in order. */
  #known:
    | { readonly list: readonly Instance[]; readonly instances: ReadonlySet<Instance> }
    | undefined = undefined;
  /** Someone calls `loadChanged`: without that no list can be kept in order. */
  #isTold = false;
  #turn = 0;
  #uses = 0;

  /** The least loaded candidate, whose turn it has been then. */
  choose(candidates: readonly Instance[]): Instance | undefined {
    const order = this.#orderOf(candidates);
    const chosen = order === undefined ? this.#search(candidates) : order.first;
    if (chosen !== undefined) this.chosen(chosen);
    return chosen;
  }

  /** An instance was chosen: it is the last among those with its load. */
  chosen(instance: Instance): void {
    this.#chosenAt.set(instance, ++this.#turn);
    for (const order of this.#orders.values()) order.moved(instance);
  }

  fewest(candidates: readonly Instance[]): number {
    const order = this.#orderOf(candidates);
    if (order !== undefined) return order.first?.inFlight ?? Number.POSITIVE_INFINITY;
    let fewest = Number.POSITIVE_INFINITY;
    for (const { inFlight } of candidates) if (inFlight < fewest) fewest = inFlight;
    return fewest;
  }

  inOrder(candidates: readonly Instance[]): Iterable<Instance> {
    return (
      this.#orderOf(candidates) ?? [...candidates].sort((one, other) => this.#compare(one, other))
    );
  }

  has(candidates: readonly Instance[], instance: Instance): boolean {
    const order = this.#orderOf(candidates);
    if (order !== undefined) return order.has(instance);
    if (this.#known?.list !== candidates)
      this.#known = { list: candidates, instances: new Set(candidates) };
    return this.#known.instances.has(instance);
  }

  /**
   * The holders that are candidates and have at most `most` requests in flight, the least loaded
   * first, at most `count`. Of many holders, those are found that are among the least loaded
   * candidates, else some.
   */
  holders(
    candidates: readonly Instance[],
    holders: Holders,
    most: number,
    count: number,
  ): Instance[] {
    const found: Instance[] = [];
    if (holders.size > LOOKED_AT) {
      let looked = 0;
      for (const candidate of this.inOrder(candidates)) {
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
      if (holder.inFlight <= most && this.has(candidates, holder)) found.push(holder);
    }
    return found.sort((one, other) => this.#compare(one, other)).slice(0, count);
  }

  /** Whose `inFlight` has changed. Called after each change from the first on. */
  loadChanged(instance: Instance): void {
    this.#isTold = true;
    for (const order of this.#orders.values()) order.loadChanged(instance);
  }

  #orderOf(candidates: readonly Instance[]): LoadOrder | undefined {
    this.#uses += 1;
    const known = this.#orders.get(candidates);
    if (known !== undefined) {
      known.usedAt = this.#uses;
      return known;
    }
    if (!this.#isTold) return undefined;
    if (!this.#seen.has(candidates)) {
      this.#seen.add(candidates);
      return undefined;
    }
    for (const [list, { usedAt }] of this.#orders)
      if (this.#orders.size >= MAX_ORDERS || this.#uses - usedAt > FORGOTTEN_AFTER)
        this.#orders.delete(list);
    const order = new LoadOrder([...candidates].sort((one, other) => this.#compare(one, other)));
    order.usedAt = this.#uses;
    this.#orders.set(candidates, order);
    return order;
  }

  #search(candidates: readonly Instance[]): Instance | undefined {
    let best: Instance | undefined;
    for (const candidate of candidates)
      if (best === undefined || this.#compare(candidate, best) < 0) best = candidate;
    return best;
  }

  #compare(one: Instance, other: Instance): number {
    if (one.inFlight !== other.inFlight) return one.inFlight - other.inFlight;
    return (this.#chosenAt.get(one) ?? 0) - (this.#chosenAt.get(other) ?? 0);
  }
}

interface Place {
  readonly instance: Instance;
  level: Level;
  before: Place | undefined;
  after: Place | undefined;
}

/** The instances with one load, in the order in which they came to it. */
interface Level {
  readonly load: number;
  first: Place | undefined;
  last: Place | undefined;
  lower: Level | undefined;
  higher: Level | undefined;
}

/**
 * Instances by load: a linked list of levels, each with a linked list of its instances. A load
 * mostly changes by one, to the next level.
 */
class LoadOrder implements Iterable<Instance> {
  usedAt = 0;
  readonly #places = new Map<Instance, Place>();
  #lowest: Level | undefined = undefined;

  /** `sorted`: the least loaded first. */
  constructor(sorted: readonly Instance[]) {
    let highest: Level | undefined;
    for (const instance of sorted) {
      const level: Level =
        highest?.load === instance.inFlight
          ? highest
          : this.#insert(instance.inFlight, highest, undefined);
      highest = level;
      const place: Place = { instance, level, before: undefined, after: undefined };
      this.#places.set(instance, place);
      append(place, level);
    }
  }

  get first(): Instance | undefined {
    return this.#lowest?.first?.instance;
  }

  has(instance: Instance): boolean {
    return this.#places.has(instance);
  }

  *[Symbol.iterator](): Generator<Instance> {
    for (let level = this.#lowest; level !== undefined; level = level.higher)
      for (let place = level.first; place !== undefined; place = place.after) yield place.instance;
  }

  loadChanged(instance: Instance): void {
    const place = this.#places.get(instance);
    if (place === undefined) return;
    const { inFlight: load } = instance;
    if (load === place.level.load) return;
    let lower: Level | undefined = place.level;
    while (lower !== undefined && lower.load > load) lower = lower.lower;
    let higher: Level | undefined = lower === undefined ? this.#lowest : lower;
    while (higher !== undefined && higher.load < load) {
      lower = higher;
      higher = higher.higher;
    }
    this.#move(place, higher?.load === load ? higher : this.#insert(load, lower, higher));
  }

  moved(instance: Instance): void {
    const place = this.#places.get(instance);
    if (place?.after !== undefined) this.#move(place, place.level);
  }

  #move(place: Place, to: Level): void {
    const { level, before, after } = place;
    if (before === undefined) level.first = after;
    else before.after = after;
    if (after === undefined) level.last = before;
    else after.before = before;
    append(place, to);
    if (level.first === undefined) this.#remove(level);
  }

  #insert(load: number, lower: Level | undefined, higher: Level | undefined): Level {
    const level: Level = { load, first: undefined, last: undefined, lower, higher };
    if (lower === undefined) this.#lowest = level;
    else lower.higher = level;
    if (higher !== undefined) higher.lower = level;
    return level;
  }

  #remove(level: Level): void {
    const { lower, higher } = level;
    if (lower === undefined) this.#lowest = higher;
    else lower.higher = higher;
    if (higher !== undefined) higher.lower = lower;
    // In the old generation it would keep its neighbours, and they theirs.
    level.lower = level.higher = undefined;
  }
}

function append(place: Place, level: Level): void {
  place.level = level;
  place.before = level.last;
  place.after = undefined;
  if (level.last === undefined) level.first = place;
  else level.last.after = place;
  level.last = place;
}
