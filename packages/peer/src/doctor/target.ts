import { KvError } from "@kv/interface";

/** A side of the pair as the user named it: a server by its URL, or only its side channel by host and port. */
export type Target =
  | { readonly kind: "server"; readonly url: string; readonly host: string }
  | { readonly kind: "side-channel"; readonly host: string; readonly port: number };

/** Errors: `KV_CONFIG_INVALID` for what is neither a URL nor `host:port`. */
export function readTarget(given: string): Target {
  const text = given.trim();
  if (/^https?:\/\//i.test(text)) {
    const url = URL.canParse(text) ? new URL(text) : undefined;
    if (url === undefined || url.username !== "" || url.search !== "" || url.hash !== "")
      throw invalid(given);
    const path = url.pathname.replace(/\/+$/, "").replace(/\/v1$/, "");
    return { kind: "server", url: `${url.origin}${path}`, host: bare(url.hostname) };
  }
  const [, host, port] = /^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):(\d{1,5})$/.exec(text) ?? [];
  if (host === undefined || Number(port) < 1 || Number(port) > 65_535) throw invalid(given);
  return { kind: "side-channel", host: bare(host), port: Number(port) };
}

/** Only the host itself reaches it there. */
export function isLoopback(host: string): boolean {
  return /^(localhost|127\.\d+\.\d+\.\d+|::1)$/i.test(host);
}

/** An address to listen on, and none to connect to. */
export function isWildcard(host: string): boolean {
  return ["0.0.0.0", "::", "*"].includes(host);
}

function bare(host: string): string {
  return host.replace(/^\[(.*)\]$/, "$1");
}

function invalid(given: string): KvError {
  return new KvError("KV_CONFIG_INVALID", `"${given}" names no server`, {
    hint: "give the URL of its HTTP port, http://host:8000, or its side channel alone, host:5600",
  });
}
