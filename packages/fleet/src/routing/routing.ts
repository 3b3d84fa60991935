import { getOrAdd } from "../get-or-add.js";
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
  return new LeastLoaded("round-robin", () => 0);
}

/** Takes the instance with the fewest requests in flight; equals take turns. */
export function leastLoad(): Routing {
  return new LeastLoaded();
}

const LOOKED_AT = 64;

interface Place {
  readonly load: number;
  readonly turn: number;
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
  readonly #byLoad: Set<Instance>[] = [];
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
    this.#append(instance, this.#loadOf(instance));
  }

  fewest(candidates: readonly Instance[]): number {
    const [first] = this.inOrder(candidates);
    return first?.inFlight ?? Number.POSITIVE_INFINITY;
  }

  *inOrder(candidates: readonly Instance[]): Generator<Instance> {
    const members = this.#membersOf(candidates);
    while (this.#lowest < this.#byLoad.length && !this.#byLoad[this.#lowest]?.size)
      this.#lowest += 1;
    for (let load = this.#lowest; load < this.#byLoad.length; load += 1)
      for (const one of this.#byLoad[load] ?? []) if (members.has(one)) yield one;
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
    for (const [instance, { load }] of this.#places) {
      if (left.has(instance)) continue;
      this.#places.delete(instance);
      this.#byLoad[load]?.delete(instance);
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
    for (const one of instances) if (!this.#places.has(one)) this.#append(one, this.#loadOf(one));
    return instances;
  }

  #refresh(instance: Instance): void {
    const load = this.#loadOf(instance);
    const before = this.#places.get(instance);
    if (before !== undefined && before.load !== load) this.#append(instance, load);
  }

  #append(instance: Instance, load: number): void {
    const before = this.#places.get(instance);
    if (before !== undefined) this.#byLoad[before.load]?.delete(instance);
    this.#places.set(instance, { load, turn: ++this.#turn });
    const equals = this.#byLoad[load] ?? new Set();
    this.#byLoad[load] = equals.add(instance);
    this.#lowest = Math.min(this.#lowest, load);
  }
}
