import { readFileSync } from "node:fs";

/** Bounds of an instance's HTTP server. They apply before a request is validated. */
export interface HttpLimits {
  /** Open connections in all. A further one takes the place of the oldest idle one, else it gets 503. */
  readonly maxConnections: number;
  /** Open connections of one remote address. A further one takes the place of its oldest idle one, else it gets 503. */
  readonly maxConnectionsPerAddress: number;
  /** Requests that are served at the same time; a further one gets 503. */
  readonly maxRequests: number;
  /** Requests of one remote address that are served at the same time; a further one gets 503. */
  readonly maxRequestsPerAddress: number;
  /** Requests of one connection that are served at the same time (pipelining); a further one gets 503, and the connection closes. */
  readonly maxRequestsPerConnection: number;
  /** Bytes of a request's headers; more get 431. */
  readonly maxHeaderBytes: number;
  /** For a request's headers, in ms; later ones get 408. */
  readonly headerTimeoutMs: number;
  /** For a whole request, headers and body, in ms; a later one gets 408. */
  readonly requestTimeoutMs: number;
  /** For which a connection stays open without a request, in ms. */
  readonly idleTimeoutMs: number;
  /** Bytes of one body; more get 413. */
  readonly maxBodyBytes: number;
  /** Bytes of all bodies that are being read. A further body takes the room of the one that is being read longest, which gets 503. */
  readonly maxBodiesBytes: number;
  /** Bytes of the bodies of one remote address that are being read, as their `Content-Length` declares them; a further body gets 503. */
  readonly maxBodiesBytesPerAddress: number;
  /** Nesting of arrays and objects in a body; more gets 400. */
  readonly maxBodyDepth: number;
  /** Members of all objects in a body, together; more get 400. */
  readonly maxBodyMembers: number;
  /** Bytes of an event stream that the client has not read yet; more end the request. */
  readonly maxUnreadBytes: number;
}

/** Some of the limits; the others have their defaults. */
export type HttpLimitsInput = { readonly [K in keyof HttpLimits]?: number | undefined };

/** The defaults of `HttpLimits`. Connections take at most a quarter of the files that the process may open. */
export function httpLimits(given: HttpLimitsInput = {}): HttpLimits {
  const maxConnections = given.maxConnections ?? Math.min(1024, Math.floor(openFilesLimit() / 4));
  const maxRequests = given.maxRequests ?? 1024;
  const maxBodiesBytes = given.maxBodiesBytes ?? 64 << 20;
  return {
    maxConnections,
    maxConnectionsPerAddress: Math.max(1, Math.floor(maxConnections / 2)),
    maxRequests,
    maxRequestsPerAddress: Math.max(1, Math.floor(maxRequests / 2)),
    maxRequestsPerConnection: 16,
    maxHeaderBytes: 16 * 1024,
    headerTimeoutMs: 10_000,
    requestTimeoutMs: 30_000,
    idleTimeoutMs: 72_000,
    maxBodyBytes: 4 << 20,
    maxBodiesBytes,
    maxBodiesBytesPerAddress: Math.max(1, Math.floor(maxBodiesBytes / 2)),
    maxBodyDepth: 64,
    maxBodyMembers: 20_000,
    maxUnreadBytes: 1 << 20,
    ...withoutUndefined(given),
  };
}

function withoutUndefined(given: HttpLimitsInput): Partial<HttpLimits> {
  return Object.fromEntries(Object.entries(given).filter(([, value]) => value !== undefined));
}

/** The soft limit of open files; 16,384 where it cannot be read. */
function openFilesLimit(): number {
  try {
    const [, soft = ""] = /^Max open files\s+(\d+)/m.exec(readFileSync("/proc/self/limits", "utf8")) ?? [];
    return soft === "" ? 16_384 : Number(soft);
  } catch {
    return 16_384;
  }
}
