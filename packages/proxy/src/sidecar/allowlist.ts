import { BlockList, isIP, isIPv4, isIPv6 } from "node:net";
import { invalidConfig } from "@kv/fleet/front-end";
import type { KvError } from "@kv/interface";

interface Rule {
  /** Undefined allows every port. */
  readonly port: number | undefined;
  /** `host` is in lower case, without brackets. */
  matches(host: string): boolean;
}

const NAME = /^(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?$/;

/**
 * Hosts and ports that a sidecar may call: IP addresses, blocks (`10.0.0.0/8`, `fd00::/8`), host
 * names, `*.SUFFIX` or `*`. `:PORT` allows one port; an IPv6 address then needs brackets. Names are
 * compared as text: a name never matches the block it resolves into.
 */
export class Allowlist {
  readonly #rules: readonly Rule[];

  /** @throws `KV_CONFIG_INVALID` for an entry that cannot be read. */
  constructor(entries: readonly string[]) {
    this.#rules = entries.map(parseRule);
  }

  allows(url: string): boolean {
    const { hostname, port, protocol } = new URL(url);
    const host = hostname.replace(/^\[|\]$/g, "").toLowerCase();
    const number = port === "" ? (protocol === "https:" ? 443 : 80) : Number(port);
    return this.#rules.some((rule) => (rule.port ?? number) === number && rule.matches(host));
  }
}

function parseRule(entry: string): Rule {
  const text = entry.trim().toLowerCase();
  const bracketed = /^\[([^\]]+)\](?::([0-9]{1,5}))?$/.exec(text);
  // An IPv6 address without brackets has no port.
  const plain = isIPv6(text.split("/")[0] ?? "")
    ? [text, text]
    : /^([^:]+)(?::([0-9]{1,5}))?$/.exec(text);
  const [, host = "", digits] = bracketed ?? plain ?? [];
  const port = digits === undefined ? undefined : Number(digits);
  if (port !== undefined && (port < 1 || port > 65_535)) throw invalidEntry(entry);
  if (host === "*") return { port, matches: () => true };
  const [address = "", prefix] = host.split("/");
  if (isIP(address) !== 0) return addressRule(entry, port, address, prefix);
  if (prefix !== undefined || bracketed !== null || !NAME.test(host)) throw invalidEntry(entry);
  if (!host.startsWith("*.")) return { port, matches: (name) => name === host };
  const suffix = host.slice(1);
  return { port, matches: (name) => isIP(name) === 0 && name.endsWith(suffix) };
}

function addressRule(
  entry: string,
  port: number | undefined,
  address: string,
  prefix?: string,
): Rule {
  const [family, bits] = isIPv4(address) ? (["ipv4", 32] as const) : (["ipv6", 128] as const);
  if (prefix !== undefined && !/^[0-9]{1,3}$/.test(prefix)) throw invalidEntry(entry);
  const length = prefix === undefined ? bits : Number(prefix);
  if (length > bits) throw invalidEntry(entry);
  const block = new BlockList();
  block.addSubnet(address, length, family);
  return {
    port,
    matches: (host) => isIP(host) !== 0 && block.check(host, isIPv4(host) ? "ipv4" : "ipv6"),
  };
}

function invalidEntry(entry: string): KvError {
  return invalidConfig(
    `"${entry}" is not an entry of an allowlist`,
    "give an address, a block such as 10.0.0.0/8, a name, *.example.org, or *; each may have :PORT, as in [fd00::/8]:8000",
  );
}
