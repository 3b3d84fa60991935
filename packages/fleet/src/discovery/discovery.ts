import type { Log } from "@kv/interface";
import { type InstanceSpec, instanceName, type Role } from "../instances/instance.js";
import type { InstancePool } from "../routing/instance-pool.js";

/** All instances that a discovery has found. */
export interface DiscoveredInstances {
  readonly prefillers: readonly InstanceSpec[];
  readonly decoders: readonly InstanceSpec[];
}

/** A source of instances that come and go: `fileDiscovery`, `dnsDiscovery`, or one of your own. */
export interface Discovery {
  readonly name: string;
  /**
   * Calls `onChange` with the complete set of instances, at first and after each change. Calls
   * `onError` when they cannot be read; the instances then stay as they were. `close` ends both.
   */
  watch(
    onChange: (found: DiscoveredInstances) => void,
    onError: (error: unknown) => void,
  ): { close(): void };
}

/** Adds the instances that a discovery finds to pools, and removes them when they are gone. */
export class DiscoveryFollower {
  readonly #name: string;
  readonly #pools: Readonly<Record<Role, InstancePool>>;
  readonly #log: Log;
  readonly #added = {
    prefill: new Map<string, InstanceSpec>(),
    decode: new Map<string, InstanceSpec>(),
  };
  readonly #watch: { close(): void };

  /** Begins to watch. Instances that were added in another way are not touched. */
  constructor(
    discovery: Discovery,
    pools: Readonly<Record<Role, InstancePool>>,
    { log }: { log: Log },
  ) {
    this.#name = discovery.name;
    this.#pools = pools;
    this.#log = log;
    this.#watch = discovery.watch(
      ({ prefillers, decoders }) => {
        this.#update("prefill", prefillers);
        this.#update("decode", decoders);
      },
      (error) => log.warn("discovery-failed", { by: discovery.name, error }),
    );
  }

  close(): void {
    this.#watch.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  #update(role: Role, found: readonly InstanceSpec[]): void {
    const pool = this.#pools[role];
    const added = this.#added[role];
    const names = new Set(found.map(instanceName));
    for (const spec of found) {
      const name = instanceName(spec);
      if (added.has(name)) continue;
      if (pool.find(spec)?.draining === false) continue;
      pool.add(spec);
      added.set(name, spec);
      this.#log.info("instance-added", { role, instance: name, by: this.#name });
    }
    for (const [name, spec] of added) {
      if (names.has(name)) continue;
      added.delete(name);
      this.#log.info("instance-draining", { role, instance: name, by: this.#name });
      pool
        .remove(spec)
        .catch((error: unknown) =>
          this.#log.warn("instance-not-removed", { instance: name, error }),
        );
    }
  }
}

/** A discovery whose last reading is known to have succeeded or failed. */
export class ObservedDiscovery implements Discovery {
  readonly name: string;
  readonly #discovery: Discovery;
  /**
   * False before the first reading. While it is, the instances are those of the last one that
   * succeeded.
   */
  isCurrent = false;

  constructor(discovery: Discovery) {
    this.name = discovery.name;
    this.#discovery = discovery;
  }

  watch(onChange: Parameters<Discovery["watch"]>[0], onError: Parameters<Discovery["watch"]>[1]) {
    return this.#discovery.watch(
      (found) => {
        this.isCurrent = true;
        onChange(found);
      },
      (error) => {
        this.isCurrent = false;
        onError(error);
      },
    );
  }
}
