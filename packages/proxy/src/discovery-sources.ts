import { lookup, resolveSrv } from "node:dns/promises";
import { readFile } from "node:fs/promises";
import type { Clock, Timer } from "@kv/interface";
import { z } from "zod";
import type { DiscoveredInstances, Discovery } from "./discovery.js";
import { instanceSpec, instanceSpecSchema } from "./instance-spec.js";
import type { ProxySettings } from "./options.js";

const fileSchema = z.strictObject({
  prefillers: z.array(instanceSpecSchema).default([]),
  decoders: z.array(instanceSpecSchema).default([]),
});

/** The discovery that the settings ask for. */
export function discoveryOf(settings: ProxySettings["discovery"], clock: Clock): Discovery | undefined {
  if (settings === undefined) return undefined;
  const { file, dns, intervalMs } = settings;
  const polling = { clock, intervalMs };
  if (file !== undefined) return fileDiscovery(file, polling);
  return dns === undefined ? undefined : dnsDiscovery(dns, polling);
}

interface Polling {
  readonly clock: Clock;
  readonly intervalMs: number;
}

/** A JSON file `{"prefillers": […], "decoders": […]}`, read again at an interval. */
export function fileDiscovery(path: string, polling: Polling): Discovery {
  return polled(`file ${path}`, polling, async () => {
    const { prefillers, decoders } = fileSchema.parse(JSON.parse(await readFile(path, "utf8")));
    return { prefillers: prefillers.map(instanceSpec), decoders: decoders.map(instanceSpec) };
  });
}

export interface DnsNames {
  /** `host:port` (all addresses of the host), or the name of SRV records, which hold the ports. */
  readonly prefill: string;
  readonly decode: string;
}

export interface Resolver {
  addresses(host: string): Promise<readonly string[]>;
  services(name: string): Promise<readonly { readonly name: string; readonly port: number }[]>;
}

const systemResolver: Resolver = {
  addresses: async (host) => (await lookup(host, { all: true })).map(({ address }) => address),
  services: resolveSrv,
};

/** Names whose addresses are the instances, as those of a headless service in Kubernetes. */
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
        : (await resolver.addresses(host)).map((ip) => `${ip.includes(":") ? `[${ip}]` : ip}:${port}`);
    return [...new Set(found)].sort().map((each) => instanceSpec(each));
  }
  return polled(`DNS ${names.prefill} ${names.decode}`, polling, async () => {
    const [prefillers, decoders] = await Promise.all([resolve(names.prefill), resolve(names.decode)]);
    return { prefillers, decoders };
  });
}

function polled(
  name: string,
  { clock, intervalMs }: Polling,
  read: () => Promise<DiscoveredInstances>,
): Discovery {
  return {
    name,
    watch(update, failed) {
      let timer: Timer | undefined;
      let closed = false;
      async function once(): Promise<void> {
        try {
          const found = await read();
          if (!closed) update(found);
        } catch (error) {
          if (!closed) failed(error);
        }
        if (!closed) timer = clock.setTimer(() => void once(), intervalMs);
      }
      void once();
      return {
        close() {
          closed = true;
          timer?.cancel();
        },
      };
    },
  };
}
