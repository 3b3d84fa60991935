import type { Ambient } from "@kv/interface";
import { type InstanceSpec, instanceName } from "./instance.js";
import type { InstancePool } from "./instances.js";

export interface DiscoveredInstances {
  readonly prefillers: readonly InstanceSpec[];
  readonly decoders: readonly InstanceSpec[];
}

/** Says which instances there are, now and whenever that changes. A file and DNS are built in; Kubernetes or etcd are others. */
export interface Discovery {
  readonly name: string;
  /** Calls `update` with all of them at each change. What cannot be read is reported by `failed`, and changes nothing. */
  watch(update: (found: DiscoveredInstances) => void, failed: (error: unknown) => void): { close(): void };
}

/** Keeps pools as a discovery says. Instances that came another way (settings, `/instances/add`) are left alone. */
export function followDiscovery(
  discovery: Discovery,
  pools: { readonly prefill: InstancePool; readonly decode: InstancePool },
  { log }: Pick<Ambient, "log">,
): { close(): void } {
  const mine = { prefill: new Map<string, InstanceSpec>(), decode: new Map<string, InstanceSpec>() };

  function apply(role: "prefill" | "decode", found: readonly InstanceSpec[]): void {
    const pool = pools[role];
    const names = new Set(found.map(instanceName));
    for (const spec of found) {
      const name = instanceName(spec);
      if (mine[role].has(name)) continue;
      if (pool.list().some((one) => instanceName(one) === name && !one.draining)) continue;
      pool.add(spec);
      mine[role].set(name, spec);
      log.info("instance-added", { role, instance: name, by: discovery.name });
    }
    for (const [name, spec] of mine[role]) {
      if (names.has(name)) continue;
      mine[role].delete(name);
      log.info("instance-draining", { role, instance: name, by: discovery.name });
      pool
        .remove(spec)
        .catch((error: unknown) => log.warn("instance-not-removed", { instance: name, error }));
    }
  }

  return discovery.watch(
    ({ prefillers, decoders }) => {
      apply("prefill", prefillers);
      apply("decode", decoders);
    },
    (error) => log.warn("discovery-failed", { by: discovery.name, error }),
  );
}
