import type { HttpBodyLimits, HttpConnectionLimits } from "./http-server.js";

/** Bounds of an engine's HTTP server. Refusals are 503 unless stated. */
export interface HttpLimits {
  /** Open connections. A further one replaces an idle one, or is refused. */
  readonly maxConnections: number;
  /**
   * Open connections of one address, or of an IPv6 /64. A further one replaces the oldest idle one
   * of the address, or is refused.
   */
  readonly maxConnectionsPerAddress: number;
  /** Requests at the same time. */
  readonly maxRequests: number;
  /** The same for one remote address. */
  readonly maxRequestsPerAddress: number;
  /** Bytes of a request's headers; more get 431. */
  readonly maxHeaderBytes: number;
  /** Time for a request's headers, in ms; then 408. */
  readonly headerTimeoutMs: number;
  /** Time for a whole request, in ms; then 408. */
  readonly requestTimeoutMs: number;
  /** How long a connection stays open without a request, in ms. */
  readonly idleTimeoutMs: number;
}

/** Bounds of the bodies of such a server. */
export interface BodiesLimits {
  /** Bytes of one body; more get 413. */
  readonly maxBodyBytes: number;
  /**
   * Bytes of all bodies without an answer, except the first 16 KiB of each. At the limit, the
   * largest arriving body gets 503.
   */
  readonly maxBodiesBytes: number;
  /** The same for one remote address. */
  readonly maxBodiesBytesPerAddress: number;
  /** Nesting of arrays and objects; more gets 400. */
  readonly maxBodyDepth: number;
  /** Members of all objects in a body; more get 400. */
  readonly maxBodyMembers: number;
}

/** The bounds for `HttpServer`. `pipelinedRequests` may wait on one connection. */
export function connectionLimits(
  limits: Omit<HttpLimits, "maxRequests" | "maxRequestsPerAddress">,
  pipelinedRequests: number,
): HttpConnectionLimits {
  return {
    connections: limits.maxConnections,
    connectionsPerAddress: limits.maxConnectionsPerAddress,
    pipelinedRequests,
    headersLengthBytes: limits.maxHeaderBytes,
    headersMs: limits.headerTimeoutMs,
    receiveMs: limits.requestTimeoutMs,
    keepAliveMs: limits.idleTimeoutMs,
  };
}

/** The bounds for `HttpServer`. */
export function bodyLimits(limits: BodiesLimits): HttpBodyLimits {
  return {
    bodyLengthBytes: limits.maxBodyBytes,
    bodiesLengthBytes: limits.maxBodiesBytes,
    bodiesPerClientLengthBytes: limits.maxBodiesBytesPerAddress,
    bodyDepth: limits.maxBodyDepth,
    bodyMembers: limits.maxBodyMembers,
    bodyValues: Number.POSITIVE_INFINITY,
  };
}
