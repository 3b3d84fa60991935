import type { IncomingHttpHeaders, OutgoingHttpHeaders } from "node:http";
import { KvError } from "@kv/interface";
import type { UpstreamAnswer } from "./upstream.js";

/** Headers that speak of one connection (RFC 9110, 7.6.1), and those that the proxy writes itself. */
const NOT_FORWARDED = new Set([
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
const OWN_OF_REQUEST = new Set([
  "host",
  "content-length",
  "content-type",
  "expect",
  "accept-encoding",
  "x-request-id",
]);

/** Headers of a leg: the client's (authorization, trace context, data-parallel rank, …) and the request's id. */
export function legHeaders(
  given: IncomingHttpHeaders,
  requestId: string,
  instance: { readonly dataParallelRank?: number | undefined } = {},
  own: Readonly<Record<string, string>> = {},
): Record<string, string | string[]> {
  const headers: Record<string, string | string[]> = {};
  const named = namedByConnection(given.connection);
  for (const name in given) {
    const value = given[name];
    if (value === undefined || NOT_FORWARDED.has(name) || OWN_OF_REQUEST.has(name) || named.has(name))
      continue;
    headers[name] = value;
  }
  headers["content-type"] = "application/json";
  // The proxy reads what comes back, so it must not be compressed.
  headers["accept-encoding"] = "identity";
  headers["x-request-id"] = requestId;
  // An instance that stands for one rank of a data-parallel server knows better than the client which that is.
  if (instance.dataParallelRank !== undefined)
    headers["x-data-parallel-rank"] = String(instance.dataParallelRank);
  return Object.assign(headers, own);
}

/** Headers of the client's answer: the instance's, and the request's id as the client knows it: a leg may have gone under another. */
export function answerHeaders(given: UpstreamAnswer["headers"], requestId: string): OutgoingHttpHeaders {
  const headers: OutgoingHttpHeaders = {};
  const named = namedByConnection(given.connection);
  for (const name in given) {
    const value = given[name];
    if (value !== undefined && !NOT_FORWARDED.has(name) && !named.has(name)) headers[name] = value;
  }
  headers["x-request-id"] = requestId;
  return headers;
}

const NONE: ReadonlySet<string> = new Set();

function namedByConnection(connection: string | string[] | undefined): ReadonlySet<string> {
  if (connection === undefined || connection === "keep-alive" || connection === "close") return NONE;
  const text = Array.isArray(connection) ? connection.join(",") : (connection ?? "");
  return new Set(text.split(",").map((name) => name.trim().toLowerCase()));
}

/**
 * The id that both legs carry. vLLM puts it into notifications, where a comma parts ids and a line break would end a header.
 * Errors: `KV_REQUEST_INVALID`.
 */
export function requestIdOf(given: IncomingHttpHeaders, fresh: () => string): string {
  const id = given["x-request-id"];
  if (id === undefined || id === "") return fresh();
  if (typeof id === "string" && /^[\x21-\x2b\x2d-\x7e]{1,200}$/.test(id)) return id;
  throw new KvError(
    "KV_REQUEST_INVALID",
    "X-Request-Id must be 1 to 200 printable ASCII characters, no blank and no comma",
    {
      details: { param: "X-Request-Id" },
    },
  );
}
