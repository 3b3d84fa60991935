import { lookup, resolveSrv } from "node:dns/promises";
import { readFile } from "node:fs/promises";
import type { Clock, Log, Timer } from "@kv/interface";
import { z } from "zod";
import { type InstanceSpec, instanceName, type Role } from "../instances/instance.js";
import { instanceSpecSchema, parseInstanceSpec } from "../instances/instance-spec.js";
import type { InstancePool } from "../routing/instance-pool.js";
import { parseSettings } from "../settings/fleet-settings.js";

/** All instances that a discovery has found. */
export interface DiscoveredInstances {
  readonly prefillers: readonly InstanceSpec[];
  readonly decoders: readonly InstanceSpec[];
}

/** A source of instances that come and go: `fileDiscovery`, `dnsDiscovery`, or your own. */
export interface Discovery {
  readonly name: string;
  /**
   * Calls `onChange` with all instances, first and after each change. Calls `onError` when reading
   * fails; the instances then stay. `close` ends both.
   */
  watch(
    onChange: (found: DiscoveredInstances) => void,
    onError: (error: unknown) => void,
  ): { close(): void };
}

/** Adds discovered instances to pools and removes lost ones. It leaves others alone. */
export class DiscoveryFollower {
  readonly #name: string;
  readonly #pools: Readonly<Record<Role, InstancePool>>;
  readonly #log: Log;
  readonly #added = {
    prefill: new Map<string, InstanceSpec>(),
    decode: new Map<string, InstanceSpec>(),
  };
  readonly #watch: { close(): void };

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

export class ObservedDiscovery implements Discovery {
  readonly name: string;
  readonly #discovery: Discovery;
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

/** How often a source is read again. */
export interface Polling {
  readonly clock: Clock;
  /** From the end of one read. */
  readonly intervalMs: number;
}

const fileSchema = z.strictObject({
  prefillers: z.array(instanceSpecSchema).default([]),
  decoders: z.array(instanceSpecSchema).default([]),
});

/**
 * Reads `{"prefillers": […], "decoders": […]}` from a JSON file, with entries for
 * `parseInstanceSpec`.
 */
export function fileDiscovery(path: string, polling: Polling): Discovery {
  return polledDiscovery(`file ${path}`, polling, async () => {
    const { prefillers, decoders } = parseSettings(
      fileSchema,
      JSON.parse(await readFile(path, "utf8")),
      { subject: `${path} is`, readme: "@kv/fleet" },
    );
    return {
      prefillers: prefillers.map(parseInstanceSpec),
      decoders: decoders.map(parseInstanceSpec),
    };
  });
}

/** DNS names of both roles: `host:port` for all addresses of a host, or an SRV name. */
export interface DnsNames {
  readonly prefill: string;
  readonly decode: string;
}

/** The DNS lookups of `dnsDiscovery`. */
export interface Resolver {
  addresses(host: string): Promise<readonly string[]>;
  services(name: string): Promise<readonly { readonly name: string; readonly port: number }[]>;
}

const systemResolver: Resolver = {
  addresses: async (host) => (await lookup(host, { all: true })).map(({ address }) => address),
  services: resolveSrv,
};

/** Resolves DNS names at an interval. Each address is an instance. */
export function dnsDiscovery(
  names: DnsNames,
  polling: Polling,
  resolver: Resolver = systemResolver,
): Discovery {
  async function resolve(name: string) {
    const [, host, port] = /^(.+):([0-9]{1,5})$/.exec(name) ?? [];
    const found =
      host === undefined
        ? (await resolver.services(name)).map((service) => `${service.name}:${service.port}`)
        : (await resolver.addresses(host)).map(
            (ip) => `${ip.includes(":") ? `[${ip}]` : ip}:${port}`,
          );
    return [...new Set(found)].sort().map((each) => parseInstanceSpec(each));
  }
  return polledDiscovery(`DNS ${names.prefill} ${names.decode}`, polling, async () => {
    const [prefillers, decoders] = await Promise.all([
      resolve(names.prefill),
      resolve(names.decode),
    ]);
    return { prefillers, decoders };
  });
}

function polledDiscovery(
  name: string,
  { clock, intervalMs }: Polling,
  read: () => Promise<DiscoveredInstances>,
): Discovery {
  return {
    name,
    watch(onChange, onError) {
      let timer: Timer | undefined;
      let closed = false;
      async function poll(): Promise<void> {
        try {
          const found = await read();
          if (!closed) onChange(found);
        } catch (error) {
          if (!closed) onError(error);
        }
        if (!closed) timer = clock.setTimer(() => void poll(), intervalMs);
      }
      void poll();
      return {
        close() {
          closed = true;
          timer?.cancel();
        },
      };
    },
  };
}
