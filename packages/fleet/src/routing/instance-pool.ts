import { type Clock, KvError, type Random } from "@kv/interface";
import {
  type Instance,
  type InstanceId,
  type InstanceSpec,
  type InstanceStatus,
  instanceName,
  partOf,
  type Role,
  type Visit,
} from "../instances/instance.js";
import { PooledInstance, type PooledInstanceOptions } from "../instances/pooled-instance.js";
import type { Pairing } from "../pairing/pairing.js";
import type { Partner } from "../pairing/pairing-entry.js";
import { LeastLoaded, type Routing, type RoutingContext } from "./routing.js";

/** Options of `InstancePool`. */
export interface InstancePoolOptions extends PooledInstanceOptions {
  readonly role: Role;
  /** The instances at the start; more come and go by `add` and `remove`. */
  readonly instances: readonly InstanceSpec[];
  readonly routing: Routing;
  readonly random: Random;
  /** Called with each instance that is added. */
  readonly added?: ((instance: PooledInstance) => void) | undefined;
  /** Knows which instances fit those of the other role. Without it all do. */
  readonly pairing?: Pairing | undefined;
}

/** The instances of one role. */
export class InstancePool {
  readonly role: Role;
  readonly routing: string;
  readonly #routing: Routing;
  readonly #clock: Clock;
  readonly #options: InstancePoolOptions;
  #instances: readonly PooledInstance[] = [];
  readonly #byName = new Map<string, PooledInstance>();
  readonly #byLoad = new LeastLoaded();
  /**
   * By a list of instances, until one changes. With many instances a search at each request would
   * take longer than all else.
   */
  #known = new WeakMap<readonly PooledInstance[], KnownList>();

  /** @throws `KV_CONFIG_INVALID` for an instance that is named twice. */
  constructor(options: InstancePoolOptions) {
    const { role, routing, clock } = options;
    this.role = role;
    this.routing = routing.name;
    this.#routing = routing;
    this.#clock = clock;
    this.#options = options;
    for (const spec of options.instances) this.add(spec);
  }

  /**
   * The instance for a request, none of `excluding`; undefined when there is none. Where all are
   * cooling down, one of these is chosen: it may be back, and an attempt costs less than a refusal.
   * With a `partner`, only instances that are its pair are chosen.
   */
  choose(
    context: RoutingContext,
    excluding: ReadonlySet<Instance>,
    partner?: Partner,
  ): PooledInstance | undefined {
    // Mostly another one is chosen anyway, and a list without those is a new one, which strategies
    // have to look through.
    const chosen = this.#chooseWithout(context, NONE, partner);
    if (chosen === undefined || !excluding.has(chosen)) return chosen;
    return this.#chooseWithout(context, excluding, partner);
  }

  #chooseWithout(
    context: RoutingContext,
    excluding: ReadonlySet<Instance>,
    partner: Partner | undefined,
  ): PooledInstance | undefined {
    const named = this.role === "prefill" ? context.prefillers : undefined;
    const candidates = this.#candidates(named ?? this.#instances, excluding, partner);
    if (candidates.length === 0) return undefined;
    const preferred = this.role === "prefill" ? context.preferredPrefill : context.preferredDecode;
    const isCandidate = (one: Instance | undefined): one is PooledInstance =>
      one !== undefined && this.#byLoad.has(candidates, one);
    if (isCandidate(preferred)) return preferred;
    if (named !== undefined) return candidates[0];
    const chosen = this.#routing.choose(candidates, context);
    return isCandidate(chosen) ? chosen : undefined;
  }

  fewestInFlight(): number | undefined {
    const ready = this.#ready(this.#instances, NONE);
    return ready[0]?.available() === true ? this.#byLoad.fewest(ready) : undefined;
  }

  /**
   * At most `count` instances that could serve in place of a chosen one, the least loaded first:
   * available, none of `excluding`, and surely pairs of all `partners`. The routing strategy is not
   * asked.
   */
  alternatives(
    count: number,
    excluding: ReadonlySet<Instance>,
    partners: readonly Instance[],
  ): readonly PooledInstance[] {
    const { pairing } = this.#options;
    const nowMs = this.#clock.now();
    const found: PooledInstance[] = [];
    for (const one of this.#byLoad.inOrder(this.#instances)) {
      const instance = one as PooledInstance;
      if (found.length >= count) break;
      if (excluding.has(instance) || !instance.available(nowMs)) continue;
      if (partners.every((partner) => pairing?.fits(instance, partner) ?? true))
        found.push(instance);
    }
    return found;
  }

  visit(
    context: RoutingContext,
    excluding: ReadonlySet<Instance>,
    partner?: Partner,
  ): Visit | undefined {
    return this.choose(context, excluding, partner)?.begin();
  }

  cachedTokens(
    instance: Instance,
    context: RoutingContext,
    charactersPerToken: number,
  ): number | undefined {
    return this.#routing.cachedTokens?.(instance, context, charactersPerToken);
  }

  readsTokenIds(): boolean {
    return this.#routing.readsTokenIds?.() ?? false;
  }

  pairingRefusal(partner: Partner, among?: readonly Instance[]): string | undefined {
    return this.#options.pairing?.refusal(this.role, partner, among);
  }

  available(): number {
    return this.#instances.filter((instance) => instance.available()).length;
  }

  status(): InstanceStatus[] {
    const { pairing } = this.#options;
    return this.#instances.map((instance) => ({
      ...instance.status(),
      pairing: pairing?.status(instance) ?? null,
      kv_events: this.#routing.kvEvents?.(instance) ?? null,
    }));
  }

  /** All instances, draining ones included, in the order in which they were added. */
  list(): readonly PooledInstance[] {
    return this.#instances;
  }

  find(id: InstanceId): PooledInstance | undefined {
    return this.#byName.get(instanceName(id));
  }

  /**
   * Adds an instance; one that is draining takes requests again.
   *
   * @throws `KV_CONFIG_INVALID` when it is in the pool already.
   */
  add(spec: InstanceSpec): void {
    const known = this.find(spec);
    if (known?.draining === true) {
      known.drain(false);
      return;
    }
    if (known !== undefined) {
      throw new KvError(
        "KV_CONFIG_INVALID",
        `the ${this.role} instance ${instanceName(spec)} is given twice`,
        { hint: "name each instance once", details: { httpStatus: 409 } },
      );
    }
    const instance = new PooledInstance(this.role, spec, {
      ...this.#options,
      changed: () => {
        this.#known = new WeakMap();
      },
      loadChanged: (changed) => {
        this.#byLoad.loadChanged(changed);
        this.#routing.loadChanged?.(changed);
      },
    });
    this.#instances = [...this.#instances, instance];
    this.#byName.set(instanceName(spec), instance);
    this.#instancesChanged();
    this.#options.added?.(instance);
  }

  /**
   * Sends the instance no further requests, from this call on. Resolves when its visits have ended.
   *
   * @throws `KV_PROXY_NO_INSTANCE` for an instance that is not in the pool.
   */
  async drain(id: InstanceId): Promise<void> {
    await this.#beginDraining(id).idle();
  }

  /**
   * Drains the instance, then forgets it.
   *
   * @throws `KV_PROXY_NO_INSTANCE` for an instance that is not in the pool.
   */
  async remove(id: InstanceId): Promise<void> {
    const removed = this.#beginDraining(id);
    await removed.idle();
    // An instance that was added again meanwhile stays.
    if (!removed.draining) return;
    this.#instances = this.#instances.filter((instance) => instance !== removed);
    if (this.find(id) === removed) this.#byName.delete(instanceName(id));
    this.#instancesChanged();
  }

  #instancesChanged(): void {
    this.#known = new WeakMap();
    this.#routing.instancesChanged?.(this.#instances);
    this.#options.pairing?.instancesChanged(this.role, this.#instances);
  }

  #beginDraining(id: InstanceId): PooledInstance {
    const found = this.find(id);
    if (found === undefined) {
      throw new KvError(
        "KV_PROXY_NO_INSTANCE",
        `there is no ${this.role} instance ${instanceName(id)}`,
        {
          hint: `there are ${this.#instances.map(instanceName).join(", ") || "none"}`,
          details: { httpStatus: 404 },
        },
      );
    }
    found.drain(true);
    return found;
  }

  #candidates(
    instances: readonly PooledInstance[],
    excluding: ReadonlySet<Instance>,
    partner: Partner | undefined,
  ): readonly PooledInstance[] {
    const { pairing } = this.#options;
    if (partner === undefined || pairing === undefined) return this.#ready(instances, excluding);
    for (const fitting of pairing.choices(instances, partner)) {
      const ready = this.#ready(fitting, excluding);
      if (ready.length > 0) return ready;
    }
    return [];
  }

  #ready(
    instances: readonly PooledInstance[],
    excluding: ReadonlySet<Instance>,
  ): readonly PooledInstance[] {
    const ready = this.#available(instances, excluding);
    if (ready.length > 0) return ready;
    const left = instances.filter((instance) => !excluding.has(instance) && !instance.draining);
    const responsive = left.filter((instance) => instance.available());
    return responsive.length > 0 ? responsive : left;
  }

  /**
   * The instances that take requests, without the excluded ones. The same array each time, until an
   * instance changes, where none or the same one is excluded: strategies keep state by array.
   */
  #available(
    instances: readonly PooledInstance[],
    excluding: ReadonlySet<Instance>,
  ): readonly PooledInstance[] {
    const nowMs = this.#clock.now();
    let known = this.#known.get(instances);
    if (known === undefined || nowMs >= known.untilMs) {
      known = knownList(instances, nowMs);
      this.#known.set(instances, known);
    }
    const { returning, lists } = known;
    let taking = 0;
    if (returning.length > 0) {
      const chance = this.#options.random.next();
      while (taking < returning.length && chance < (returning[taking]?.returningShare(nowMs) ?? 0))
        taking += 1;
    }
    let list = lists[taking];
    if (list === undefined) {
      const without = new Set(returning.slice(taking));
      const all = partOf(
        instances,
        (instance) => instance.available(nowMs) && !without.has(instance),
      );
      list = { all, excluded: undefined, others: all };
      lists[taking] = list;
    }
    const { all } = list;
    const [excluded, ...more] = [...excluding].filter((one) => this.#byLoad.has(all, one));
    if (excluded === undefined) return all;
    if (more.length > 0) return all.filter((instance) => !excluding.has(instance));
    if (list.excluded !== excluded) {
      list.excluded = excluded;
      list.others = all.filter((instance) => instance !== excluded);
    }
    return list.others;
  }
}

/** What is known of a list of instances. */
interface KnownList {
  /**
   * Instances that return from ejection and take only a share of the requests, the largest share
   * first.
   */
  readonly returning: readonly PooledInstance[];
  /**
   * The instances that may serve a request, by how many of `returning` may serve it, and those
   * without the one that was last excluded. Made on demand.
   */
  readonly lists: {
    readonly all: readonly PooledInstance[];
    excluded: Instance | undefined;
    others: readonly PooledInstance[];
  }[];
  readonly untilMs: number;
}

function knownList(instances: readonly PooledInstance[], nowMs: number): KnownList {
  let untilMs = Number.POSITIVE_INFINITY;
  const returning: PooledInstance[] = [];
  for (const instance of instances) {
    untilMs = Math.min(untilMs, instance.steadyUntilMs(nowMs));
    if (instance.available(nowMs) && instance.returningShare(nowMs) < 1) returning.push(instance);
  }
  returning.sort((one, other) => other.returningShare(nowMs) - one.returningShare(nowMs));
  return { returning, lists: [], untilMs };
}

const NONE: ReadonlySet<never> = new Set();
