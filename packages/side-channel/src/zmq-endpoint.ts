import { lookup } from "node:dns/promises";
import { isIP } from "node:net";

/**
 * Resolves a host name, IPv4 first; `*` is every IPv4 address of this host.
 *
 * @throws those of the lookup.
 */
export async function resolveHost(host: string): Promise<string> {
  if (host === "*") return "0.0.0.0";
  if (isIP(host) !== 0) return host;
  const { address } = await lookup(host, { verbatim: false });
  return address;
}

/** Reads `tcp://host:port`, an IPv6 address without brackets; undefined for other text. */
export function readTcpEndpoint(
  endpoint: string,
): { readonly host: string; readonly port: number } | undefined {
  const [, bracketed, plain, port] =
    /^tcp:\/\/(?:\[([^\]]+)\]|([^:[\]]+)):(\d{1,5})$/.exec(endpoint) ?? [];
  const host = bracketed ?? plain;
  return host === undefined || Number(port) > 65_535 ? undefined : { host, port: Number(port) };
}

export function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
