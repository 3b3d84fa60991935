import type { IncomingHttpHeaders, OutgoingHttpHeaders } from "node:http";
import { KvError, type Random } from "@kv/interface";
import type { UpstreamAnswer } from "../upstream/upstream.js";

/** Headers of one connection only (RFC 9110, 7.6.1). */
const HOP_BY_HOP = new Set([
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

/** Headers of a leg: the client's (authorization, trace context, data-parallel rank, …), the request's id, and `traceHeaders` over the client's. */
export function legHeaders(
  clientHeaders: IncomingHttpHeaders,
  requestId: string,
  instance: { readonly dataParallelRank?: number | undefined } = {},
  traceHeaders: Readonly<Record<string, string>> = {},
): Record<string, string | string[]> {
  const headers: Record<string, string | string[]> = {};
  const named = namedByConnection(clientHeaders.connection);
  for (const name in clientHeaders) {
    const value = clientHeaders[name];
    if (value === undefined || HOP_BY_HOP.has(name) || SET_BY_PROXY.has(name) || named.has(name)) continue;
    headers[name] = value;
  }
  headers["content-type"] = "application/json";
  // The proxy reads the answer, so it must not be compressed.
  headers["accept-encoding"] = "identity";
  headers["x-request-id"] = requestId;
  // An instance that is one rank of a data-parallel server overrides the client's choice of a rank.
  if (instance.dataParallelRank !== undefined)
    headers["x-data-parallel-rank"] = String(instance.dataParallelRank);
  return Object.assign(headers, traceHeaders);
}

/** Headers of the client's answer: the instance's, and the client's request id, as a leg may have had another. */
export function answerHeaders(
  instanceHeaders: UpstreamAnswer["headers"],
  requestId: string,
): OutgoingHttpHeaders {
  const headers: OutgoingHttpHeaders = {};
  const named = namedByConnection(instanceHeaders.connection);
  for (const name in instanceHeaders) {
    const value = instanceHeaders[name];
    if (value !== undefined && !HOP_BY_HOP.has(name) && !named.has(name)) headers[name] = value;
  }
  headers["x-request-id"] = requestId;
  return headers;
}

const NONE: ReadonlySet<string> = new Set();

/** The headers that a `Connection` header names as hop-by-hop. */
function namedByConnection(connection: string | string[] | undefined): ReadonlySet<string> {
  if (connection === undefined || connection === "keep-alive" || connection === "close") return NONE;
  const text = Array.isArray(connection) ? connection.join(",") : (connection ?? "");
  return new Set(text.split(",").map((name) => name.trim().toLowerCase()));
}

/**
 * The client's `X-Request-Id`, else a new id. vLLM puts it into notifications, where a comma separates ids, so the characters are limited.
 * Errors: `KV_REQUEST_INVALID`.
 */
export function requestIdOf(headers: IncomingHttpHeaders, random: Random): string {
  const id = headers["x-request-id"];
  if (id === undefined || id === "") return random.uuid();
  if (typeof id === "string" && /^[\x21-\x2b\x2d-\x7e]{1,200}$/.test(id)) return id;
  throw new KvError(
    "KV_REQUEST_INVALID",
    "X-Request-Id must be 1 to 200 printable ASCII characters without spaces and commas",
    {
      details: { param: "X-Request-Id" },
    },
  );
}
