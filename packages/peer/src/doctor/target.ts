import { networkInterfaces } from "node:os";
import { KvError } from "@kv/interface";

/** A server's HTTP URL, or its side channel alone. */
export type Target =
  | {
      readonly kind: "server";
      /** Without a trailing slash and `/v1`. */
      readonly url: string;
      /** IPv6 without brackets. */
      readonly host: string;
    }
  | {
      readonly kind: "side-channel";
      /** IPv6 without brackets. */
      readonly host: string;
      readonly port: number;
    };

/**
 * Reads "http://host:port" or "host:port".
 *
 * @throws `KV_CONFIG_INVALID` for any other text.
 */
export function readTarget(text: string): Target {
  const trimmed = text.trim();
  if (/^https?:\/\//i.test(trimmed)) {
    const url = URL.canParse(trimmed) ? new URL(trimmed) : undefined;
    if (url === undefined || url.username !== "" || url.search !== "" || url.hash !== "")
      throw invalid(text);
    const path = url.pathname.replace(/\/+$/, "").replace(/\/v1$/, "");
    return { kind: "server", url: `${url.origin}${path}`, host: withoutBrackets(url.hostname) };
  }
  const [, host, port] =
    /^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):(\d{1,5})$/.exec(trimmed) ?? [];
  if (host === undefined || Number(port) < 1 || Number(port) > 65_535) throw invalid(text);
  return { kind: "side-channel", host: withoutBrackets(host), port: Number(port) };
}

export function isLoopback(host: string): boolean {
  return /^(localhost|127\.\d+\.\d+\.\d+|::1)$/i.test(host);
}

export function isThisHost(host: string): boolean {
  const addresses = Object.values(networkInterfaces()).flatMap((entries) => entries ?? []);
  return isLoopback(host) || addresses.some(({ address }) => address === host);
}

export function isWildcard(host: string): boolean {
  return ["0.0.0.0", "::", "*"].includes(host);
}

function withoutBrackets(host: string): string {
  return host.replace(/^\[(.*)\]$/, "$1");
}

function invalid(text: string): KvError {
  return new KvError("KV_CONFIG_INVALID", `"${text}" is not the address of a server`, {
    hint: "give the URL of its HTTP port, http://host:8000, or its side channel alone, host:5600",
  });
}

/** @throws `KV_CONFIG_INVALID` for a side channel or any other text. */
export function serverUrl(text: string): string {
  const target = readTarget(text);
  if (target.kind === "server") return target.url;
  throw new KvError("KV_CONFIG_INVALID", `"${text}" is not a URL`, {
    hint: `give http://${text} if it is an HTTP port`,
  });
}
