import { KvError, type Random } from "@kv/interface";
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
import {
  getOrAdd,
  PooledInstance,
  type PooledInstanceOptions,
} from "../instances/pooled-instance.js";
import type { Partner } from "../pairing/kinds.js";
import type { Pairing } from "../pairing/pairing.js";
import { LeastLoaded, type Routing, type RoutingContext } from "./routing.js";

/** Options of `InstancePool`. */
export interface InstancePoolOptions extends PooledInstanceOptions {
  readonly role: Role;
  /** The first ones; `add` and `remove` change them. */
  readonly instances: readonly InstanceSpec[];
  readonly routing: Routing;
  readonly random: Random;
  readonly added?: ((instance: PooledInstance) => void) | undefined;
  /** Called when an instance begins to drain, which it ends after. */
  readonly leaving?: ((instance: PooledInstance) => Promise<void>) | undefined;
  /** Without it all fit. */
  readonly pairing?: Pairing | undefined;
}

/** The instances of both roles. */
export type InstancePools = Readonly<Record<Role, InstancePool>>;

/** The instances of one role. */
export class InstancePool {
  readonly role: Role;
  #routing: Routing;
  #instances: readonly PooledInstance[] = [];
  readonly #byName = new Map<string, PooledInstance>();
  readonly #byLoad = new LeastLoaded();
  /**
   * By list, until an instance changes. A search per request would dominate with many instances.
   */
  #known = new WeakMap<readonly PooledInstance[], KnownList>();

  /** @throws `KV_CONFIG_INVALID` for an instance that is named twice. */
  constructor(private readonly options: InstancePoolOptions) {
    this.role = options.role;
    this.#routing = options.routing;
    for (const spec of options.instances) this.add(spec);
  }

  get routing(): string {
    return this.#routing.name;
  }

  /** Takes another strategy for the requests that follow. The caller closes the old one. */
  reroute(routing: Routing): void {
    this.#routing = routing;
    routing.instancesChanged?.(this.#instances);
  }

  /**
   * An instance for a request, none of `excluding`; undefined without one. If all cool down it
   * takes one of them, since an attempt costs less than a refusal. With a `partner` it takes only
   * its pairs.
   */
  choose(
    context: RoutingContext,
    excluding: ReadonlySet<Instance>,
    partner?: Partner,
  ): PooledInstance | undefined {
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
    if (named !== undefined) return candidates.find((one) => one === preferred) ?? candidates[0];
    const candidateOf = (one: Instance | undefined) =>
      candidates.includes(one as PooledInstance) ? (one as PooledInstance) : undefined;
    const taken = preferred && candidateOf(preferred);
    return taken ?? candidateOf(this.#routing.choose(candidates, context));
  }

  fewestInFlight(): number | undefined {
    const ready = this.#ready(this.#instances, NONE);
    return ready[0]?.available() === true ? this.#byLoad.fewest(ready) : undefined;
  }

  /**
   * At most `count` substitutes, least loaded first: available, none of `excluding`, and proven
   * pairs of all `partners`. The strategy is not asked.
   */
  alternatives(
    count: number,
    excluding: ReadonlySet<Instance>,
    partners: readonly Instance[],
  ): readonly PooledInstance[] {
    const { pairing, clock } = this.options;
    const nowMs = clock.now();
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

  /** Whether the instance reports what it has cached. */
  reports(instance: Instance): boolean {
    return this.#routing.kvEvents?.(instance) != null;
  }

  readsTokenIds(): boolean {
    return this.#routing.readsTokenIds?.() ?? false;
  }

  pairingRefusal(partner: Partner, among?: readonly Instance[]): string | undefined {
    return this.options.pairing?.refusal(this.role, partner, among);
  }

  available(): number {
    return this.#instances.filter((instance) => instance.available()).length;
  }

  status(): InstanceStatus[] {
    const { pairing } = this.options;
    return this.#instances.map((instance) => ({
      ...instance.status(),
      pairing: pairing?.status(instance) ?? null,
      kv_events: this.#routing.kvEvents?.(instance) ?? null,
    }));
  }

  /** Includes draining ones, in the order of addition. */
  list(): readonly PooledInstance[] {
    return this.#instances;
  }

  find(id: InstanceId): PooledInstance | undefined {
    return this.#byName.get(instanceName(id));
  }

  /**
   * Adds an instance. A draining one takes requests again.
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
    const instance = new PooledInstance(this.role, spec, this.options, {
      changed: () => {
        this.#known = new WeakMap();
      },
      loadChanged: (changed) => {
        this.#byLoad.loadChanged(changed);
        this.#routing.loadChanged?.(changed);
      },
      list: () => this.#instances,
    });
    this.#instances = [...this.#instances, instance];
    this.#byName.set(instanceName(spec), instance);
    this.#instancesChanged();
    this.options.added?.(instance);
  }

  /**
   * Stops new requests to the instance at once. Resolves when its visits have ended, and its KV is
   * handed over.
   *
   * @throws `KV_PROXY_NO_INSTANCE` for an instance that is not in the pool.
   */
  async drain(id: InstanceId): Promise<void> {
    await this.#drained(id);
  }

  /**
   * Drains the instance, then forgets it.
   *
   * @throws `KV_PROXY_NO_INSTANCE` for an instance that is not in the pool.
   */
  async remove(id: InstanceId): Promise<void> {
    const removed = await this.#drained(id);
    // An instance that was added again meanwhile stays.
    if (!removed.draining) return;
    this.#instances = this.#instances.filter((instance) => instance !== removed);
    if (this.find(id) === removed) this.#byName.delete(instanceName(id));
    this.#instancesChanged();
  }

  #instancesChanged(): void {
    this.#known = new WeakMap();
    this.#byLoad.instancesChanged(this.#instances);
    this.#routing.instancesChanged?.(this.#instances);
    this.options.pairing?.instancesChanged(this.role, this.#instances);
  }

  async #drained(id: InstanceId): Promise<PooledInstance> {
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
    await Promise.all([found.idle(), this.options.leaving?.(found)]);
    return found;
  }

  #candidates(
    instances: readonly PooledInstance[],
    excluding: ReadonlySet<Instance>,
    partner: Partner | undefined,
  ): readonly PooledInstance[] {
    const { pairing } = this.options;
    if (partner === undefined || pairing === undefined) return this.#ready(instances, excluding);
    for (const fitting of pairing.choices(instances, partner)) {
      const ready = this.#ready(fitting, excluding);
      if (ready.length > 0) return ready;
    }
    return [];
  }

  /**
   * Instances that take requests: a share of the returning ones, else all of them, else those that
   * cool down.
   */
  #ready(
    instances: readonly PooledInstance[],
    excluding: ReadonlySet<Instance>,
  ): readonly PooledInstance[] {
    const nowMs = this.options.clock.now();
    let known = this.#known.get(instances);
    if (known === undefined || nowMs >= known.untilMs) {
      known = new KnownList(instances, nowMs);
      this.#known.set(instances, known);
    }
    const { available, returning, notDraining } = known;
    const chance = returning.length === 0 ? 0 : this.options.random.next();
    const resting = returning.filter((one) => chance >= one.returningShare(nowMs));
    const out = resting.length === 0 ? excluding : new Set([...excluding, ...resting]);
    const ready = known.without(available, out);
    if (ready.length > 0) return ready;
    const responsive = known.without(available, excluding);
    return responsive.length > 0 ? responsive : known.without(notDraining, excluding);
  }
}

/**
 * What is known of a list. Strategies keep state by list, so the lists here are the same until an
 * instance or the exclusions change.
 */
class KnownList {
  readonly available: readonly PooledInstance[];
  /** Back from ejection, with a share of requests. */
  readonly returning: readonly PooledInstance[];
  readonly notDraining: readonly PooledInstance[];
  readonly untilMs: number;
  readonly #parts = new Map<string, readonly PooledInstance[]>();

  constructor(instances: readonly PooledInstance[], nowMs: number) {
    this.available = partOf(instances, (one) => one.available(nowMs));
    this.returning = this.available.filter((one) => one.returningShare(nowMs) < 1);
    this.notDraining = partOf(instances, (one) => !one.draining);
    this.untilMs = Math.min(...instances.map((one) => one.steadyUntilMs(nowMs)));
  }

  without(list: readonly PooledInstance[], out: ReadonlySet<Instance>): readonly PooledInstance[] {
    if (out.size === 0) return list;
    const key = [list === this.available, ...Array.from(out, instanceName)].join(" ");
    if (this.#parts.size > MAX_PARTS) this.#parts.clear();
    return getOrAdd(this.#parts, key, () => partOf(list, (one) => !out.has(one)));
  }
}

const MAX_PARTS = 8;
const NONE: ReadonlySet<never> = new Set();
