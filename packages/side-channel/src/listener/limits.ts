import { readFileSync } from "node:fs";
import type { Clock, Log, LogFields } from "@kv/interface";

/**
 * Limits on a side channel's peers, known or not. Exceeding one closes that connection, with at
 * most one log entry per reason in ten seconds.
 */
export interface SideChannelLimits {
  /**
   * Connections to all listeners. When all are used, the address with the most loses the one idle
   * longest. Default: 1024, at most a quarter of the file descriptors, which HTTP, the transport
   * and outgoing connections need too.
   */
  readonly maxConnections: number;
  /**
   * Connections of one remote address; for IPv6, of one /64 network. Room is made in the same way.
   * Default: half of `maxConnections`.
   */
  readonly maxConnectionsPerAddress: number;
  /** Frames of a request, with its delimiter. Default 16. */
  readonly maxRequestFrames: number;
  /** Bytes of a request, all frames together, checked when a header arrives. Default 16 KiB. */
  readonly maxRequestBytes: number;
  /** Requests answered at a time, one per connection; others wait. Default 256. */
  readonly maxPending: number;
  /**
   * Bytes of replies that peers have not taken, over all connections. Above it, the connection that
   * has waited longest is closed. No request is read before the reply to the last one was taken.
   * Default 64 MiB.
   */
  readonly maxQueuedBytes: number;
  /** Time from accepting a connection to the end of ZMTP's handshake. Default 5 s. */
  readonly greetingTimeoutMs: number;
  /** Time for a request from first to last byte, and for a peer to take a reply. Default 5 s. */
  readonly messageTimeoutMs: number;
  /**
   * Closes a connection without requests, heartbeats or not. libzmq reconnects when needed. Default
   * 60 s.
   */
  readonly idleTimeoutMs: number;
}

const ASSUMED_DESCRIPTORS = 4096;

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

/** The process's soft limit. `process.report` would look up the names of all open connections. */
function descriptorLimit(): number {
  try {
    const found = /^Max open files\s+(\d+)/m.exec(readFileSync("/proc/self/limits", "latin1"));
    return found === null ? ASSUMED_DESCRIPTORS : Number(found[1]);
  } catch {
    return ASSUMED_DESCRIPTORS;
  }
}

const WINDOW_MS = 10_000;

/**
 * Warnings that peers can cause at will. The first of each reason is logged; those of the next ten
 * seconds are counted and logged as one. Reasons must be ours; a peer's text belongs in the fields.
 */
export class LimitedWarnings {
  readonly #clock: Clock;
  readonly #log: Log;
  /** Suppressed since the last entry, by event and reason. */
  readonly #windows = new Map<string, { suppressed: number; fields: LogFields }>();

  constructor(clock: Clock, log: Log) {
    this.#clock = clock;
    this.#log = log;
  }

  warn(event: string, reason: string, fields: LogFields): void {
    const key = `${event} ${reason}`;
    const window = this.#windows.get(key);
    if (window !== undefined) {
      window.suppressed += 1;
      window.fields = fields;
      return;
    }
    this.#log.warn(event, { ...fields, suppressed: 0 });
    this.#open(event, key);
  }

  #open(event: string, key: string): void {
    const window = { suppressed: 0, fields: {} as LogFields };
    this.#windows.set(key, window);
    this.#clock.setTimer(() => {
      this.#windows.delete(key);
      if (window.suppressed === 0) return;
      // `suppressed` counts those without an entry.
      this.#log.warn(event, { ...window.fields, suppressed: window.suppressed });
      this.#open(event, key);
    }, WINDOW_MS);
  }
}
