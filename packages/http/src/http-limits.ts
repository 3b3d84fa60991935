import type { HttpBodyLimits, HttpConnectionLimits } from "./http-server.js";

/**
 * Bounds of an HTTP server of an engine, before a request is validated. Each refusal has 503,
 * unless it says otherwise.
 */
export interface HttpLimits {
  /** Open connections in all. A further one takes the place of an idle one, else it gets 503. */
  readonly maxConnections: number;
  /**
   * Open connections of one remote address, or of an IPv6 /64. A further one takes the place of its
   * oldest idle one, else it gets 503.
   */
  readonly maxConnectionsPerAddress: number;
  /** Requests that are served at the same time; a further one gets 503. */
  readonly maxRequests: number;
  /** The same of one remote address. */
  readonly maxRequestsPerAddress: number;
  /** Bytes of a request's headers; more get 431. */
  readonly maxHeaderBytes: number;
  /** For a request's headers, in ms; later ones get 408. */
  readonly headerTimeoutMs: number;
  /** For a whole request, headers and body, in ms; a later one gets 408. */
  readonly requestTimeoutMs: number;
  /** For which a connection stays open without a request, in ms. */
  readonly idleTimeoutMs: number;
}

/** Bounds of the bodies of such a server. */
export interface BodiesLimits {
  /** Bytes of one body; more get 413. */
  readonly maxBodyBytes: number;
  /**
   * Bytes of the bodies of all requests without an answer; the first 16 KiB of a body do not count.
   * At the limit, the largest that is still arriving gets 503.
   */
  readonly maxBodiesBytes: number;
  /** The same of one remote address. */
  readonly maxBodiesBytesPerAddress: number;
  /** Nesting of arrays and objects in a body; more gets 400. */
  readonly maxBodyDepth: number;
  /** Members of all objects in a body, together; more get 400. */
  readonly maxBodyMembers: number;
}

/**
 * The bounds as an `HttpServer` takes them. `pipelinedRequests`: those of one connection that wait.
 */
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

/** The bounds as an `HttpServer` takes them. */
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
