import { parseInstanceSpec } from "@kv/fleet";
import { KvError } from "@kv/interface";
import type { ProxySettingsInput } from "../config/settings.js";

/** Where a sidecar listens, and its settings. */
export interface SidecarOfRank {
  readonly port: number;
  readonly settings: ProxySettingsInput;
}

/**
 * The sidecar of a data-parallel rank: its port, the HTTP port and the side channel of its decode
 * instance, and its admin port, each by `rank` above those of rank 0; port 0, which takes a free
 * one, stays.
 * @throws `KV_CONFIG_INVALID` for a port above 65535, or a decode instance that is already one
 * rank.
 */
export function sidecarOfRank({ port, settings }: SidecarOfRank, rank: number): SidecarOfRank {
  const [decoder] = settings.decoders ?? [];
  if (rank === 0 || decoder === undefined) return { port, settings };
  const { url, kv, dataParallelRank, ...spec } = parseInstanceSpec(decoder);
  if (dataParallelRank !== undefined)
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--decode ${url}@${dataParallelRank} is one rank already`,
      {
        hint: "give the port of rank 0, or leave out --data-parallel-size",
      },
    );
  const of = new URL(url);
  const decodePort = of.port === "" ? (of.protocol === "https:" ? 443 : 80) : Number(of.port);
  of.port = `${above(decodePort, rank)}`;
  const { admin } = settings;
  return {
    port: above(port, rank),
    settings: {
      ...settings,
      decoders: [
        {
          ...spec,
          url: of.origin,
          ...(kv === undefined
            ? {}
            : { kv: { ...kv, ...(kv.port === undefined ? {} : { port: above(kv.port, rank) }) } }),
        },
      ],
      ...(admin === undefined ? {} : { admin: { ...admin, port: above(admin.port, rank) } }),
    },
  };
}

function above(port: number, rank: number): number {
  if (port === 0) return 0;
  if (port + rank <= 65_535) return port + rank;
  throw new KvError("KV_CONFIG_INVALID", `port ${port} of rank 0 leaves no port for rank ${rank}`, {
    hint: "give a lower port, or a smaller --data-parallel-size",
  });
}
