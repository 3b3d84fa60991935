import { lookup } from "node:dns/promises";
import { isIP } from "node:net";

/**
 * The address to connect to or to bind. Host names are resolved here, IPv4 first; `*` is every IPv4 address of this host. Errors: those of the
 * lookup.
 */
export async function resolveHost(host: string): Promise<string> {
  if (host === "*") return "0.0.0.0";
  if (isIP(host) !== 0) return host;
  const { address } = await lookup(host, { verbatim: false });
  return address;
}

/** The text of a thrown value. */
export function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
