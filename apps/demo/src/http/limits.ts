import { readFileSync } from "node:fs";
import type { BodiesLimits, HttpLimits as ServerLimits } from "@kv/http";
import { defined } from "../defined.js";

/** Bounds of an instance's HTTP server. They apply before a request is validated. */
export interface HttpLimits extends ServerLimits, BodiesLimits {
  /** Requests of one connection, waiting ones included (pipelining); a further one gets 503. */
  readonly maxRequestsPerConnection: number;
  /** Bytes of an event stream that the client has not read yet; more end the request. */
  readonly maxUnreadBytes: number;
}

export type HttpLimitsInput = { readonly [K in keyof HttpLimits]?: number | undefined };

/** Connections take at most a quarter of the files that the process may open. */
export function httpLimits(given: HttpLimitsInput = {}): HttpLimits {
  const maxConnections = given.maxConnections ?? Math.min(1024, Math.floor(openFilesLimit() / 4));
  const maxRequests = given.maxRequests ?? 1024;
  const maxBodiesBytes = given.maxBodiesBytes ?? 64 << 20;
  const half = (limit: number) => Math.max(1, Math.floor(limit / 2));
  return {
    maxConnections,
    maxConnectionsPerAddress: half(maxConnections),
    maxRequests,
    maxRequestsPerAddress: half(maxRequests),
    maxRequestsPerConnection: 16,
    maxHeaderBytes: 16 * 1024,
    headerTimeoutMs: 10_000,
    requestTimeoutMs: 30_000,
    idleTimeoutMs: 72_000,
    maxBodyBytes: 4 << 20,
    maxBodiesBytes,
    maxBodiesBytesPerAddress: half(maxBodiesBytes),
    maxBodyDepth: 64,
    maxBodyMembers: 20_000,
    maxUnreadBytes: 1 << 20,
    ...defined(given),
  };
}

function openFilesLimit(): number {
  try {
    const limits = readFileSync("/proc/self/limits", "utf8");
    return Number(/^Max open files\s+(\d+)/m.exec(limits)?.[1] ?? 16_384);
  } catch {
    return 16_384;
  }
}
