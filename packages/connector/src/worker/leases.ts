import type { Clock, Timer } from "@kv/interface";

/**
 * How long a producer's worker keeps the blocks of a finished request for its readers. A lease runs from the engine's
 * `requestFinished`; a heartbeat makes it `max(what it was, now + extension)`, as in vLLM 0.33 (lease 30 s, heartbeats
 * each lease / 6, extension lease · 2 / 3).
 */
export interface Leases {
  grant(id: string, options: LeaseTerms): void;
  /** A heartbeat named these; ids without a lease are ignored (a reader may speak before the step that grants, or after the end). */
  extend(ids: Iterable<string>): void;
  /** Ends a lease early; true if there was one. */
  release(id: string): boolean;
  has(id: string): boolean;
  /** When the lease ends unless something extends it. */
  expiresAtMs(id: string): number | undefined;
  readonly size: number;
  /** Ends all leases without a word, and the timer. */
  close(): void;
}

export interface LeaseTerms {
  readonly expiresAtMs: number;
  /**
   * When the lease ends if no heartbeat ever names it; `expiresAtMs` when absent. This is where
   * `VLLM_NIXL_ABORT_REQUEST_TIMEOUT` goes: readers older than heartbeats had that long.
   */
  readonly unattendedExpiresAtMs?: number;
}

export interface LeasesOptions {
  readonly clock: Clock;
  readonly extensionMs: number;
  /** Called from the timer, after the lease is gone. */
  onExpired(id: string): void;
}

interface Lease {
  attendedMs: number;
  readonly unattendedMs: number;
  attended: boolean;
}

export function createLeases({ clock, extensionMs, onExpired }: LeasesOptions): Leases {
  const leases = new Map<string, Lease>();
  let timer: Timer | undefined;
  let timerAtMs = Number.POSITIVE_INFINITY;

  function arm(): void {
    let earliestMs = Number.POSITIVE_INFINITY;
    for (const lease of leases.values()) earliestMs = Math.min(earliestMs, end(lease));
    if (earliestMs === timerAtMs) return;
    timer?.cancel();
    timer = undefined;
    timerAtMs = earliestMs;
    if (earliestMs !== Number.POSITIVE_INFINITY) {
      // Whole milliseconds: what is left may be less than the clock can tell apart, and would be waited for without end.
      timer = clock.setTimer(expire, Math.max(0, Math.ceil(earliestMs - clock.now())));
    }
  }

  function expire(): void {
    timer = undefined;
    timerAtMs = Number.POSITIVE_INFINITY;
    const nowMs = clock.now();
    // Heartbeats move single leases, so the map is in no order: all are looked at.
    const expired = [...leases].filter(([, lease]) => nowMs >= end(lease)).map(([id]) => id);
    for (const id of expired) leases.delete(id);
    arm();
    for (const id of expired) onExpired(id);
  }

  return {
    grant(id, { expiresAtMs, unattendedExpiresAtMs }) {
      leases.set(id, {
        attendedMs: expiresAtMs,
        unattendedMs: unattendedExpiresAtMs ?? expiresAtMs,
        attended: false,
      });
      arm();
    },
    extend(ids) {
      const extendedMs = clock.now() + extensionMs;
      let earlier = false;
      for (const id of ids) {
        const lease = leases.get(id);
        if (lease === undefined) continue;
        lease.attended = true;
        lease.attendedMs = Math.max(lease.attendedMs, extendedMs);
        earlier ||= lease.attendedMs < timerAtMs;
      }
      // A timer that fires too early looks again: cheaper than moving it at each heartbeat. One too late would not do.
      if (earlier) arm();
    },
    release(id) {
      const had = leases.delete(id);
      if (leases.size === 0) arm();
      return had;
    },
    has: (id) => leases.has(id),
    expiresAtMs(id) {
      const lease = leases.get(id);
      return lease === undefined ? undefined : end(lease);
    },
    get size() {
      return leases.size;
    },
    close() {
      leases.clear();
      arm();
    },
  };
}

function end(lease: Lease): number {
  return lease.attended ? lease.attendedMs : lease.unattendedMs;
}
