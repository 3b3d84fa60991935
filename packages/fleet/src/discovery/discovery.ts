import { lookup, resolveSrv } from "node:dns/promises";
import { readFile } from "node:fs/promises";
import type { Clock, Log } from "@kv/interface";
import { z } from "zod";
import { type InstanceSpec, instanceName } from "../instances/instance.js";
import { instanceSpecSchema, parseInstanceSpec } from "../instances/instance-spec.js";
import { repeat } from "../repeat.js";
import type { InstancePool, InstancePools } from "../routing/instance-pool.js";
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
   * Calls `onChange` with all instances, first and after each change; one may be named twice.
   * Calls `onError` when reading fails; the instances then stay. `close` ends both.
   */
  watch(
    onChange: (found: DiscoveredInstances) => void,
    onError: (error: unknown) => void,
  ): { close(): void };
}

/** Adds discovered instances to pools and removes lost ones. It leaves others alone. */
export class DiscoveryFollower {
  readonly #watch: { close(): void };

  constructor(discovery: Discovery, pools: InstancePools, { log }: { log: Log }) {
    const { name: by } = discovery;
    const prefill = updating(pools.prefill, log, by);
    const decode = updating(pools.decode, log, by);
    this.#watch = discovery.watch(
      ({ prefillers, decoders }) => {
        prefill(prefillers);
        decode(decoders);
      },
      (error) => log.warn("discovery-failed", { by, error }),
    );
  }

  close(): void {
    this.#watch.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }
}

function updating(pool: InstancePool, log: Log, by: string) {
  const { role } = pool;
  const added = new Map<string, InstanceSpec>();
  return (found: readonly InstanceSpec[]): void => {
    for (const spec of found) {
      const instance = instanceName(spec);
      if (added.has(instance) || pool.find(spec)?.draining === false) continue;
      pool.add(spec);
      added.set(instance, spec);
      log.info("instance-added", { role, instance, by });
    }
    const names = new Set(found.map(instanceName));
    for (const [instance, spec] of added) {
      if (names.has(instance)) continue;
      added.delete(instance);
      log.info("instance-draining", { role, instance, by });
      pool
        .remove(spec)
        .catch((error: unknown) => log.warn("instance-not-removed", { instance, error }));
    }
  };
}

/** A discovery, and whether its last reading succeeded. */
export interface ObservedDiscovery extends Discovery {
  readonly isCurrent: boolean;
}

export function observed(discovery: Discovery): ObservedDiscovery {
  const own = {
    name: discovery.name,
    isCurrent: false,
    watch: (onChange: (found: DiscoveredInstances) => void, onError: (error: unknown) => void) =>
      discovery.watch(
        (found) => {
          own.isCurrent = true;
          onChange(found);
        },
        (error) => {
          own.isCurrent = false;
          onError(error);
        },
      ),
  };
  return own;
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
    watch: (onChange, onError) =>
      repeat(clock, async (isClosed) => {
        try {
          const found = await read();
          if (!isClosed()) onChange(found);
        } catch (error) {
          if (!isClosed()) onError(error);
        }
        return intervalMs;
      }),
  };
}
