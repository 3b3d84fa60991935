import { readFileSync } from "node:fs";
import type { BodiesLimits, HttpLimits as ServerLimits } from "@kv/http";
import { defined } from "../defined.js";

/** Bounds of an instance's HTTP server. They apply before a request is validated. */
export interface HttpLimits extends ServerLimits, BodiesLimits {
  /**
   * Requests of one connection, the one that is served and those that wait (pipelining); with a
   * further one, the connection gets 503 and ends.
   */
  readonly maxRequestsPerConnection: number;
  /** Bytes of an event stream that the client has not read yet; more end the request. */
  readonly maxUnreadBytes: number;
}

/** Some of the limits; the others have their defaults. */
export type HttpLimitsInput = { readonly [K in keyof HttpLimits]?: number | undefined };

/**
 * The defaults of `HttpLimits`. Connections take at most a quarter of the files that the process
 * may open.
 */
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
    ...defined(given),
  };
}

/** The soft limit of open files; 16,384 where it cannot be read. */
function openFilesLimit(): number {
  try {
    const [, soft = ""] =
      /^Max open files\s+(\d+)/m.exec(readFileSync("/proc/self/limits", "utf8")) ?? [];
    return soft === "" ? 16_384 : Number(soft);
  } catch {
    return 16_384;
  }
}
