import { KvError } from "@kv/interface";
import { InvalidArgumentError } from "commander";
import { readTarget } from "../doctor/target.js";

/** A whole number of at least 1. */
export function count(text: string): number {
  if (!/^[1-9]\d{0,9}$/.test(text))
    throw new InvalidArgumentError("It must be a whole number of at least 1.");
  return Number(text);
}

/** "a,b" as ["a", "b"]. */
export function commaSeparated(text: string): string[] {
  return text.split(",").filter((part) => part !== "");
}

/** "host:port"; an IPv6 address is in brackets. */
export function hostAndPort(text: string): { host: string; port: number } {
  const [, host, port] = /^(.+):(\d{1,5})$/.exec(text) ?? [];
  if (host === undefined || Number(port) < 1 || Number(port) > 65_535)
    throw new InvalidArgumentError("It must be host:port.");
  return { host: host.replace(/^\[(.*)\]$/, "$1"), port: Number(port) };
}

/** "5%" or "0.05" as 0.05. */
export function share(text: string): number {
  const isPercent = text.endsWith("%");
  const value = Number(isPercent ? text.slice(0, -1) : text) / (isPercent ? 100 : 1);
  if (text === "" || text === "%" || !(value >= 0 && value <= 1))
    throw new InvalidArgumentError("It must be a share, such as 5% or 0.05.");
  return value;
}

const UNITS_MS: Readonly<Record<string, number>> = { ms: 1, s: 1000, m: 60_000, h: 3_600_000 };

/** "90s", "2m" or "500ms" in ms; a bare number is seconds. */
export function duration(text: string): number {
  const [, value, unit = "s"] = /^(\d+(?:\.\d+)?)(ms|s|m|h)?$/.exec(text) ?? [];
  const ms = Number(value) * (UNITS_MS[unit] ?? Number.NaN);
  if (!(ms > 0 && ms < 2 ** 31))
    throw new InvalidArgumentError("It must be a time, such as 90s or 2m; a bare number is seconds.");
  return ms;
}

/** A whole number, 0 included. */
export function atLeastZero(text: string): number {
  return text === "0" ? 0 : count(text);
}

/** "100,300" as [100, 300]. */
export function counts(text: string): number[] {
  return commaSeparated(text).map(count);
}

/** A TCP port, or 0 for a free one. */
export function port(text: string): number {
  if (!/^\d{1,5}$/.test(text) || Number(text) > 65_535)
    throw new InvalidArgumentError("It must be a whole number of 0 to 65535.");
  return Number(text);
}

/** The base URL of an HTTP server. Errors: `KV_CONFIG_INVALID` for a side channel or any other text. */
export function serverUrl(text: string): string {
  const target = readTarget(text);
  if (target.kind === "server") return target.url;
  throw new KvError("KV_CONFIG_INVALID", `"${text}" is not a URL`, {
    hint: `give http://${text} if it is an HTTP port`,
  });
}
