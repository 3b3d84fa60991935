import { lookup, resolveSrv } from "node:dns/promises";
import { readFile } from "node:fs/promises";
import type { Clock, Timer } from "@kv/interface";
import { z } from "zod";
import { instanceSpecSchema, parseInstanceSpec } from "../instances/instance-spec.js";
import type { DiscoveredInstances, Discovery } from "./discovery.js";

/** How often a source is read again. */
export interface Polling {
  readonly clock: Clock;
  /** Between the end of one read and the next, in milliseconds. */
  readonly intervalMs: number;
}

const fileSchema = z.strictObject({
  prefillers: z.array(instanceSpecSchema).default([]),
  decoders: z.array(instanceSpecSchema).default([]),
});

/**
 * Reads a JSON file `{"prefillers": […], "decoders": […]}`, whose entries are those of
 * `parseInstanceSpec`, at an interval.
 */
export function fileDiscovery(path: string, polling: Polling): Discovery {
  return polledDiscovery(`file ${path}`, polling, async () => {
    const { prefillers, decoders } = fileSchema.parse(JSON.parse(await readFile(path, "utf8")));
    return {
      prefillers: prefillers.map(parseInstanceSpec),
      decoders: decoders.map(parseInstanceSpec),
    };
  });
}

/**
 * The DNS names of both roles: `host:port` for all addresses of a host, or the name of SRV records,
 * which include ports.
 */
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

/**
 * Resolves DNS names at an interval, such as those of headless services in Kubernetes. Each address
 * is an instance.
 */
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
