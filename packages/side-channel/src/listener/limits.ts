import { readFileSync } from "node:fs";

/**
 * What the peers of a side channel may use before and after anybody is known. Reaching a limit
 * closes the connection that reached it and is logged, at most once per reason in ten seconds;
 * other connections are served as before.
 */
export interface SideChannelLimits {
  /**
   * Connections to all listeners of the side channel. When all are in use, one makes room: of the
   * address with the most connections, the one whose peer has done nothing for longest. Default:
   * 1024, and at most a quarter of the process's file descriptors, so that the rest is left for
   * HTTP, the transport and outgoing connections.
   */
  readonly maxConnections: number;
  /**
   * Connections of one remote address; of IPv6, of one /64 network. Room is made in the same way.
   * Default: half of `maxConnections`.
   */
  readonly maxConnectionsPerAddress: number;
  /** Frames of a request, with its delimiter. Default 16. */
  readonly maxRequestFrames: number;
  /**
   * Bytes of a request, all frames together. A frame that would exceed them is refused when its
   * header arrives. Default 16 KiB.
   */
  readonly maxRequestBytes: number;
  /**
   * Requests that are answered at a time; further ones wait in their connections. A connection has
   * one at a time. Default 256.
   */
  readonly maxPending: number;
  /**
   * Bytes of replies, over all connections, that peers have not taken yet. Above it, the connection
   * that has waited for longest is closed. A connection's next request is not read before its reply
   * was taken. Default 64 MiB.
   */
  readonly maxQueuedBytes: number;
  /** Time from accepting a connection to the end of ZMTP's handshake. Default 5 s. */
  readonly greetingTimeoutMs: number;
  /**
   * Time for a request from its first byte to its last, and for a peer to take a reply. Default 5
   * s.
   */
  readonly messageTimeoutMs: number;
  /**
   * A connection without a request for this long is closed, heartbeats or not. libzmq connects
   * again when it needs to. Default 60 s.
   */
  readonly idleTimeoutMs: number;
}

/** Assumed where the operating system does not tell. */
const ASSUMED_DESCRIPTORS = 4096;

/** Completes the limits. */
export function sideChannelLimits(given: Partial<SideChannelLimits>): SideChannelLimits {
  const maxConnections = given.maxConnections ?? Math.min(1024, Math.floor(descriptorLimit() / 4));
  return {
    maxConnections,
    maxConnectionsPerAddress: given.maxConnectionsPerAddress ?? Math.ceil(maxConnections / 2),
    maxRequestFrames: given.maxRequestFrames ?? 16,
    maxRequestBytes: given.maxRequestBytes ?? 16 * 1024,
    maxPending: given.maxPending ?? 256,
    maxQueuedBytes: given.maxQueuedBytes ?? 64 * 2 ** 20,
    greetingTimeoutMs: given.greetingTimeoutMs ?? 5000,
    messageTimeoutMs: given.messageTimeoutMs ?? 5000,
    idleTimeoutMs: given.idleTimeoutMs ?? 60_000,
  };
}

/**
 * The soft limit of this process's file descriptors. Not from `process.report`, which looks up the
 * names of all open connections.
 */
function descriptorLimit(): number {
  try {
    const found = /^Max open files\s+(\d+)/m.exec(readFileSync("/proc/self/limits", "latin1"));
    return found === null ? ASSUMED_DESCRIPTORS : Number(found[1]);
  } catch {
    return ASSUMED_DESCRIPTORS;
  }
}
