import type { Ambient } from "@kv/interface";
import type { InstanceSpec } from "./instance.js";
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
  const mine = { prefill: new Set<string>(), decode: new Set<string>() };

  function apply(role: "prefill" | "decode", found: readonly InstanceSpec[]): void {
    const pool = pools[role];
    const urls = new Set(found.map(({ url }) => url));
    for (const spec of found) {
      if (mine[role].has(spec.url)) continue;
      if (pool.list().some(({ url, draining }) => url === spec.url && !draining)) continue;
      pool.add(spec);
      mine[role].add(spec.url);
      log.info("instance-added", { role, instance: spec.url, by: discovery.name });
    }
    for (const url of mine[role]) {
      if (urls.has(url)) continue;
      mine[role].delete(url);
      log.info("instance-draining", { role, instance: url, by: discovery.name });
      pool.remove(url).catch((error: unknown) => log.warn("instance-not-removed", { instance: url, error }));
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
