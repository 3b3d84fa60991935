import { type Clock, KvError, type Random } from "@kv/interface";
import {
  createPooledInstance,
  type Instance,
  type InstanceId,
  type InstanceSpec,
  type InstanceStatus,
  type InstanceTimes,
  instanceName,
  type PooledInstance,
  type Visit,
} from "./instance.js";
import type { Routing, RoutingContext } from "./routing.js";
import type { Role } from "./upstream.js";

export interface InstancePool {
  readonly role: Role;
  readonly routing: string;
  /** An instance that is not in `excluding`; undefined when there is none. */
  choose(context: RoutingContext, excluding: ReadonlySet<Instance>): PooledInstance | undefined;
  /** Begins a visit at such an instance. */
  visit(context: RoutingContext, excluding: ReadonlySet<Instance>): Visit | undefined;
  available(): number;
  status(): InstanceStatus[];
  list(): readonly PooledInstance[];
  /** Errors: `KV_CONFIG_INVALID` when it is there. One that drains takes requests again. */
  add(spec: InstanceSpec): void;
  /** No further requests, from this call on; resolves when those in flight have ended. Errors: `KV_PROXY_NO_INSTANCE` for an unknown one. */
  drain(id: InstanceId): Promise<void>;
  /** Drains, and forgets it then. */
  remove(id: InstanceId): Promise<void>;
}

export interface InstancePoolOptions {
  readonly role: Role;
  readonly instances: readonly InstanceSpec[];
  readonly routing: Routing;
  readonly clock: Clock;
  readonly random: Random;
  readonly times: InstanceTimes;
}

export function createInstancePool(options: InstancePoolOptions): InstancePool {
  const { role, routing, clock } = options;
  let instances: readonly PooledInstance[] = [];

  function find(id: InstanceId): PooledInstance | undefined {
    return instances.find((instance) => instanceName(instance) === instanceName(id));
  }
  function add(spec: InstanceSpec): void {
    const known = find(spec);
    if (known?.draining === true) {
      known.drain(false);
      return;
    }
    if (known !== undefined) {
      throw new KvError("KV_CONFIG_INVALID", `the ${role} instance ${instanceName(spec)} is given twice`, {
        hint: "name each instance once",
        details: { httpStatus: 409 },
      });
    }
    instances = [...instances, createPooledInstance(role, spec, options)];
    routing.instancesChanged?.(instances);
  }
  function beginDraining(id: InstanceId): PooledInstance {
    const found = find(id);
    if (found === undefined) {
      throw new KvError("KV_PROXY_NO_INSTANCE", `there is no ${role} instance ${instanceName(id)}`, {
        hint: `there are ${instances.map(instanceName).join(", ") || "none"}`,
        details: { httpStatus: 404 },
      });
    }
    found.drain(true);
    return found;
  }
  for (const spec of options.instances) add(spec);

  function candidates(excluding: ReadonlySet<Instance>): readonly PooledInstance[] {
    const nowMs = clock.now();
    const admitting = instances.filter((instance) => !excluding.has(instance) && instance.admits(nowMs));
    if (admitting.length > 0) return admitting;
    const left = instances.filter((instance) => !excluding.has(instance) && !instance.draining);
    const available = left.filter((instance) => instance.available());
    // All cooling down: one of them may be back, and an attempt costs less than a refusal.
    return available.length > 0 ? available : left;
  }
  function choose(context: RoutingContext, excluding: ReadonlySet<Instance>): PooledInstance | undefined {
    const among = candidates(excluding);
    if (among.length === 0) return undefined;
    const preferred = role === "prefill" ? context.preferredPrefill : undefined;
    const chosen = among.find((candidate) => candidate === preferred) ?? routing.choose(among, context);
    return among.find((candidate) => candidate === chosen);
  }

  return {
    role,
    routing: routing.name,
    choose,
    visit: (context, excluding) => choose(context, excluding)?.begin(),
    available: () => instances.filter((instance) => instance.available()).length,
    status: () => instances.map((instance) => instance.status()),
    list: () => instances,
    add,
    async drain(id) {
      await beginDraining(id).idle();
    },
    async remove(id) {
      const gone = beginDraining(id);
      await gone.idle();
      // One that was added again meanwhile stays.
      instances = instances.filter((instance) => instance !== gone || !instance.draining);
      routing.instancesChanged?.(instances);
    },
  };
}
