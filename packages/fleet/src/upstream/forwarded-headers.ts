import type { Role } from "../instances/instance.js";
import TABLE from "./client-headers.json" with { type: "json" };

/** Headers of one connection only (RFC 9110, 7.6.1). */
export const HOP_BY_HOP: ReadonlySet<string> = new Set(TABLE.hopByHop);
/** Headers that the proxy sets in each leg. */
const SET_BY_PROXY: ReadonlySet<string> = new Set(TABLE.setByProxy);

/**
 * Who gets a client's header. `both`: P and D. `decode`: D alone, as it concerns the answer or a
 * rank of one server. `proxy`: the proxy sets it. `none`: nobody, unless a setting forwards it.
 */
export type HeaderUse = "both" | "decode" | "proxy" | "none";

/**
 * The headers that vLLM reads (0.31 to 0.33; a test compares), those of traces, and the key of
 * Anthropic's clients, which a front end of vLLM may read. All others end at the proxy, above all
 * credentials.
 */
export const CLIENT_HEADERS = TABLE.clients as Readonly<Record<string, HeaderUse>>;

/** False for headers of one connection or of the proxy. */
export function mayForward(name: string): boolean {
  const lower = name.toLowerCase();
  return !HOP_BY_HOP.has(lower) && !SET_BY_PROXY.has(lower);
}

/** Client headers for instances of each role, in lower case. */
export type ForwardedHeaders = Readonly<Record<Role, ReadonlySet<string>>>;

/** Adds `more` to `CLIENT_HEADERS`, for both legs. */
export function forwardedHeaders(more: readonly string[]): ForwardedHeaders {
  const names = Object.keys(CLIENT_HEADERS);
  const added = more.map((name) => name.toLowerCase());
  const both = [...names.filter((name) => CLIENT_HEADERS[name] === "both"), ...added];
  const decode = names.filter((name) => CLIENT_HEADERS[name] === "decode");
  return { prefill: new Set(both), decode: new Set([...both, ...decode]) };
}
