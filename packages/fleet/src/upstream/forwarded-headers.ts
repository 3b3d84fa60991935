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
/** Headers that the proxy sets in each leg. */
const SET_BY_PROXY = new Set([
  "host",
  "content-length",
  "content-type",
  "expect",
  "accept-encoding",
  "x-request-id",
]);

/**
 * Who gets a client's header. `both`: P and D. `decode`: D alone, as it concerns the answer or a
 * rank of one server. `proxy`: the proxy sets it. `none`: nobody, unless a setting forwards it.
 */
export type HeaderUse = "both" | "decode" | "proxy" | "none";

/**
 * The headers that vLLM reads (0.31 to 0.33; a test compares), and those of traces. All others end
 * at the proxy, above all credentials.
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
