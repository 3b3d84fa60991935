import { parseInstanceSpec } from "@kv/fleet";
import { invalidConfig } from "@kv/fleet/front-end";
import type { ProxySettingsInput } from "../config/settings.js";

export interface SidecarOfRank {
  readonly port: number;
  readonly settings: ProxySettingsInput;
}

/**
 * Adds `rank` to rank 0's ports: own port, admin port, and D's HTTP and side-channel ports. Port 0
 * (a free port) stays.
 * @throws `KV_CONFIG_INVALID` for a port above 65535, or a decode instance that is already one
 * rank.
 */
export function sidecarOfRank(
  { port, settings: ofAll }: SidecarOfRank,
  rank: number,
  count: number,
): SidecarOfRank {
  const isOneOfMany = count > 1 && port !== 0;
  const settings = isOneOfMany
    ? { ...ofAll, sidecar: { ...ofAll.sidecar, ranks: { firstPort: port, count } } }
    : ofAll;
  const [decoder] = settings.decoders ?? [];
  if (rank === 0 || decoder === undefined) return { port, settings };
  const { url, kv, dataParallelRank, ...spec } = parseInstanceSpec(decoder);
  if (dataParallelRank !== undefined)
    throw invalidConfig(
      `--decode ${url}@${dataParallelRank} is one rank already`,
      "give the port of rank 0, or leave out --data-parallel-size",
    );
  const of = new URL(url);
  const decodePort = of.port === "" ? (of.protocol === "https:" ? 443 : 80) : Number(of.port);
  of.port = `${above(decodePort, rank)}`;
  const { admin } = settings;
  const side = kv?.port === undefined ? kv : { ...kv, port: above(kv.port, rank) };
  return {
    port: above(port, rank),
    settings: {
      ...settings,
      decoders: [{ ...spec, url: of.origin, kv: side }],
      admin: admin && { ...admin, port: above(admin.port, rank) },
    },
  };
}

function above(port: number, rank: number): number {
  if (port === 0) return 0;
  if (port + rank <= 65_535) return port + rank;
  throw invalidConfig(
    `port ${port} of rank 0 leaves no port for rank ${rank}`,
    "give a lower port, or a smaller --data-parallel-size",
  );
}
