import type { Role } from "../instances/instance.js";

/** Headers of one connection only (RFC 9110, 7.6.1). */
export const HOP_BY_HOP = new Set([
  "connection",
  "keep-alive",
  "proxy-authenticate",
  "proxy-authorization",
  "proxy-connection",
  "te",
  "trailer",
  "transfer-encoding",
  "upgrade",
]);
/** Headers of a leg that the proxy sets itself. */
const SET_BY_PROXY = new Set([
  "host",
  "content-length",
  "content-type",
  "expect",
  "accept-encoding",
  "x-request-id",
]);

/**
 * What becomes of a client's header. `both`: P and D get it. `decode`: D alone, as it concerns the
 * answer or names a rank of one server. `proxy`: the proxy sets it in each leg. `none`: it ends at
 * the proxy, unless a setting forwards it.
 */
export type HeaderUse = "both" | "decode" | "proxy" | "none";

/**
 * The headers that vLLM reads (0.31 to 0.33; a test compares), and those of traces. All others end
 * at the proxy, credentials first of all.
 */
export const CLIENT_HEADERS: Readonly<Record<string, HeaderUse>> = {
  traceparent: "both",
  tracestate: "both",
  baggage: "both",
  "x-session-id": "both",
  "x-vllm-priority": "both",
  accept: "decode",
  "x-data-parallel-rank": "decode",
  "endpoint-load-metrics-format": "decode",
  "content-type": "proxy",
  "x-request-id": "proxy",
  authorization: "none",
  // Anthropic's clients send it; a front end of vLLM may read it.
  "x-api-key": "none",
};

/** Whether a header can be forwarded: it is neither of one connection nor set by the proxy. */
export function mayForward(name: string): boolean {
  const lower = name.toLowerCase();
  return !HOP_BY_HOP.has(lower) && !SET_BY_PROXY.has(lower);
}

/** The names of the clients' headers that instances of each role get, in lower case. */
export type ForwardedHeaders = Readonly<Record<Role, ReadonlySet<string>>>;

/** The headers of `CLIENT_HEADERS`, and `more`, which both legs get. */
export function forwardedHeaders(more: readonly string[]): ForwardedHeaders {
  const names = Object.keys(CLIENT_HEADERS);
  const added = more.map((name) => name.toLowerCase());
  const both = [...names.filter((name) => CLIENT_HEADERS[name] === "both"), ...added];
  const decode = names.filter((name) => CLIENT_HEADERS[name] === "decode");
  return { prefill: new Set(both), decode: new Set([...both, ...decode]) };
}
