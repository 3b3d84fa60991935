import type { IncomingHttpHeaders, OutgoingHttpHeaders } from "node:http";
import { KvError, type Random } from "@kv/interface";

/** The headers of an instance's answer, names in lower case. */
export type AnswerHeaders = Readonly<Record<string, string | string[] | undefined>>;

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

/** A client's headers that instances get. All others end at the proxy, credentials first of all. */
const FORWARDED_HEADERS = ["accept", "traceparent", "tracestate", "baggage", "x-data-parallel-rank"] as const;

/** Whether a header can be forwarded: it is neither of one connection nor set by the proxy. */
export function mayForward(name: string): boolean {
  const lower = name.toLowerCase();
  return !HOP_BY_HOP.has(lower) && !SET_BY_PROXY.has(lower);
}

/** The names of the headers that instances get, `more` included, in lower case. */
export function forwardedHeaders(more: readonly string[]): ReadonlySet<string> {
  return new Set([...FORWARDED_HEADERS, ...more.map((name) => name.toLowerCase())]);
}

/** What the headers of a leg are made of. */
export interface LegHeadersOptions {
  readonly clientHeaders: IncomingHttpHeaders;
  /** The names of the client's headers that the instance gets. */
  readonly forwarded: ReadonlySet<string>;
  readonly requestId: string;
  readonly instance?: { readonly dataParallelRank?: number | undefined } | undefined;
  /** `traceparent` of the leg's span. Undefined where none is recorded: the client's passes unchanged. */
  readonly traceparent?: string | undefined;
}

/** Headers of a leg: those of the client that are forwarded, the request's id, and `traceparent` over the client's. */
export function legHeaders({
  clientHeaders,
  forwarded,
  requestId,
  instance,
  traceparent,
}: LegHeadersOptions): Record<string, string | string[]> {
  const headers: Record<string, string | string[]> = {};
  const named = namedByConnection(clientHeaders.connection);
  for (const name of forwarded) {
    const value = clientHeaders[name];
    if (value !== undefined && !named.has(name)) headers[name] = value;
  }
  headers["content-type"] = "application/json";
  // The proxy reads the answer, so it must not be compressed.
  headers["accept-encoding"] = "identity";
  headers["x-request-id"] = requestId;
  // An instance that is one rank of a data-parallel server overrides the client's choice of a rank.
  if (instance?.dataParallelRank !== undefined)
    headers["x-data-parallel-rank"] = String(instance.dataParallelRank);
  if (traceparent !== undefined) headers["traceparent"] = traceparent;
  return headers;
}

/** The value of the `traceparent` header; undefined where there is none, or more than one. */
export function traceparentOf({ traceparent }: IncomingHttpHeaders): string | undefined {
  return typeof traceparent === "string" ? traceparent : undefined;
}

/** Headers of the client's answer: the instance's, and the client's request id, as a leg may have had another. */
export function answerHeaders(instanceHeaders: AnswerHeaders, requestId: string): OutgoingHttpHeaders {
  const headers: OutgoingHttpHeaders = {};
  const named = namedByConnection(instanceHeaders.connection);
  for (const name in instanceHeaders) {
    const value = instanceHeaders[name];
    if (value !== undefined && !HOP_BY_HOP.has(name) && !named.has(name)) headers[name] = value;
  }
  headers["x-request-id"] = requestId;
  return headers;
}

/** Headers that hold for any body of an answer. Others may describe the bytes of one: its length, its coding, its digest, or what it has cost. */
const OF_ANY_BODY = ["content-type", "cache-control", "retry-after", "x-accel-buffering"] as const;

/** The headers of an instance's answer that stay when its body is merged with others, or changed. */
export function changedBodyHeaders(headers: AnswerHeaders): AnswerHeaders {
  return Object.fromEntries(OF_ANY_BODY.map((name) => [name, headers[name]]));
}

const NONE: ReadonlySet<string> = new Set();

/** The headers that a `Connection` header names as hop-by-hop. */
function namedByConnection(connection: string | string[] | undefined): ReadonlySet<string> {
  if (connection === undefined || connection === "keep-alive" || connection === "close") return NONE;
  const text = Array.isArray(connection) ? connection.join(",") : (connection ?? "");
  return new Set(text.split(",").map((name) => name.trim().toLowerCase()));
}

/**
 * The longest id of a client. Engines take 200 characters. The proxy adds the number of a part, and in push a UUID and `-release`: 177 with the
 * default limit of parts.
 */
export const REQUEST_ID_LENGTH = 128;

const REQUEST_ID = new RegExp(`^[\\x21-\\x2b\\x2d-\\x7e]{1,${REQUEST_ID_LENGTH}}$`);

/** What an id of a request must be. */
export const REQUEST_ID_RULE = `1 to ${REQUEST_ID_LENGTH} printable ASCII characters without spaces and commas`;

/** Whether a client may give a request this id. vLLM puts it into notifications, where a comma separates ids, so the characters are limited. */
export function isRequestId(id: string): boolean {
  return REQUEST_ID.test(id);
}

/** The client's `X-Request-Id`, else a new id. Errors: `KV_REQUEST_INVALID`. */
export function requestIdOf(headers: IncomingHttpHeaders, random: Random): string {
  const id = headers["x-request-id"];
  if (id === undefined || id === "") return random.uuid();
  if (typeof id === "string" && isRequestId(id)) return id;
  throw new KvError("KV_REQUEST_INVALID", `X-Request-Id must be ${REQUEST_ID_RULE}`, {
    details: { param: "X-Request-Id", limit: "length of X-Request-Id" },
  });
}
