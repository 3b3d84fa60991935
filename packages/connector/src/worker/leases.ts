import { type Clock, KvError, type Span, type Timer, type Tracer } from "@kv/interface";
import type { LeaseOrder } from "../scheduler/step-types.js";

/** When a lease ends. */
export interface LeaseTerms {
  /** End of the lease on the local clock, in ms; heartbeats extend it. */
  readonly expiresAtMs: number;
  /**
   * End of the lease when no heartbeat ever names it, in ms; `expiresAtMs` when absent. It comes
   * from `VLLM_NIXL_ABORT_REQUEST_TIMEOUT`, for D's of versions that send no heartbeats.
   */
  readonly unattendedExpiresAtMs?: number | undefined;
  /** Parent of the lease's span. */
  readonly traceparent?: string | undefined;
}

/** Options of `Leases`. */
export interface LeasesOptions {
  /** Times the leases. */
  readonly clock: Clock;
  /**
   * How long a heartbeat extends a lease from its arrival, in ms. vLLM 0.33: two thirds of the
   * lease.
   */
  readonly extensionMs: number;
  /** Gets a span for each lease, with an event for each extension. @default undefined */
  readonly tracer?: Tracer | undefined;
  /** Called from a timer for each lease that has ended. `close` does not call it. */
  onExpired(id: string): void;
}

interface Lease {
  attendedMs: number;
  readonly unattendedMs: number;
  isAttended: boolean;
  readonly span: Span | undefined;
  timer: Timer | undefined;
  timerAtMs: number;
}

/**
 * How long P's worker keeps the blocks of finished requests for their readers. A lease starts at
 * the engine's `requestFinished`; a heartbeat makes its end `max(end, now + extension)`, as in vLLM
 * 0.33 (lease 30 s, heartbeats every sixth, extension two thirds of it).
 */
export class Leases {
  readonly #options: LeasesOptions;
  readonly #leases = new Map<string, Lease>();

  constructor(options: LeasesOptions) {
    this.#options = options;
  }

  /** Grants a lease. */
  grant(id: string, { expiresAtMs, unattendedExpiresAtMs, traceparent }: LeaseTerms): void {
    const { clock, tracer } = this.#options;
    const span = tracer?.start("kv.lease", {
      parent: traceparent,
      attributes: { "kv.wire_id": id, "kv.lease.granted_ms": expiresAtMs - clock.now() },
    });
    this.#leases.get(id)?.timer?.cancel();
    const lease: Lease = {
      attendedMs: expiresAtMs,
      unattendedMs: unattendedExpiresAtMs ?? expiresAtMs,
      isAttended: false,
      span,
      timer: undefined,
      timerAtMs: Number.POSITIVE_INFINITY,
    };
    this.#leases.set(id, lease);
    this.#arm(id, lease);
  }

  /**
   * Extends the leases that a heartbeat names. Ids without a lease are ignored: it has ended, or
   * its step has not arrived yet.
   */
  extend(ids: Iterable<string>): void {
    const extendedMs = this.#options.clock.now() + this.#options.extensionMs;
    for (const id of ids) {
      const lease = this.#leases.get(id);
      if (lease === undefined) continue;
      lease.isAttended = true;
      lease.attendedMs = Math.max(lease.attendedMs, extendedMs);
      lease.span?.event("extended", { "kv.lease.extension_ms": this.#options.extensionMs });
      // A timer that fires too early checks again, which is cheaper than moving it at each
      // heartbeat. Only a timer that is too late must move.
      if (lease.attendedMs < lease.timerAtMs) this.#arm(id, lease);
    }
  }

  /** Ends a lease early. Returns whether there was one. */
  release(id: string): boolean {
    const lease = this.#leases.get(id);
    lease?.timer?.cancel();
    lease?.span?.end();
    return this.#leases.delete(id);
  }

  /** Whether the id has a lease. */
  has(id: string): boolean {
    return this.#leases.has(id);
  }

  /** When the lease ends unless it is extended, in ms on the local clock. */
  expiresAtMs(id: string): number | undefined {
    const lease = this.#leases.get(id);
    return lease === undefined ? undefined : end(lease);
  }

  /** Number of leases. */
  get size(): number {
    return this.#leases.size;
  }

  /** Ends all leases without calling `onExpired`. */
  close(): void {
    for (const { timer } of this.#leases.values()) timer?.cancel();
    this.#leases.clear();
  }

  /** As `close`. */
  [Symbol.dispose](): void {
    this.close();
  }

  /** Each lease has a timer of its own: setting one costs the same with any number of leases. */
  #arm(id: string, lease: Lease): void {
    const { clock } = this.#options;
    lease.timer?.cancel();
    lease.timerAtMs = end(lease);
    // Whole milliseconds: with a remainder below the clock's resolution, the timer would fire again
    // and again.
    const delayMs = Math.max(0, Math.ceil(lease.timerAtMs - clock.now()));
    lease.timer = clock.setTimer(() => this.#check(id, lease), delayMs);
  }

  #check(id: string, lease: Lease): void {
    if (this.#options.clock.now() < end(lease)) {
      this.#arm(id, lease);
      return;
    }
    this.#leases.delete(id);
    lease.span?.end(
      new KvError("KV_LEASE_EXPIRED", "the lease ended before every reader was done"),
    );
    this.#options.onExpired(id);
  }
}

/**
 * The terms of a lease order on this worker's clock. The scheduler may run in another process with
 * another clock origin; the delay of the step makes the lease longer, which is safe.
 */
export function localLeaseTerms(
  order: LeaseOrder,
  schedulerClockMs: number,
  nowMs: number,
): LeaseTerms {
  const toLocalMs = (atMs: number) => nowMs + (atMs - schedulerClockMs);
  const { expiresAtMs, unattendedExpiresAtMs, traceparent } = order;
  return {
    traceparent,
    expiresAtMs: toLocalMs(expiresAtMs),
    unattendedExpiresAtMs:
      unattendedExpiresAtMs === undefined ? undefined : toLocalMs(unattendedExpiresAtMs),
  };
}

function end(lease: Lease): number {
  return lease.isAttended ? lease.attendedMs : lease.unattendedMs;
}
