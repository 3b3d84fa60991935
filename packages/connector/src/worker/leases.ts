import {
  type Clock,
  KvError,
  type Log,
  type LogFields,
  type Span,
  type Timer,
  type Tracer,
} from "@kv/interface";
import { sameCapability } from "@kv/protocol";
import type { LeaseOrder } from "../requests/step-metadata.js";

/** When a lease ends, on the scheduler's clock. */
type LeaseTerms = Pick<
  LeaseOrder,
  "wireId" | "expiresAtMs" | "unattendedExpiresAtMs" | "traceparent"
>;

/** Options of `Leases`. */
export interface LeasesOptions {
  readonly clock: Clock;
  /**
   * How long a heartbeat extends a lease from its arrival, in ms. vLLM 0.33: two thirds of the
   * lease.
   */
  readonly extensionMs: number;
  /** Gets a span for each lease, with an event for each extension. */
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

  /**
   * Grants the lease of an order. The scheduler may run in another process, whose clock was
   * `schedulerClockMs` at the step: the delay of the step makes the lease longer, which is safe.
   */
  grant(order: LeaseTerms, schedulerClockMs: number): void {
    const { clock, tracer } = this.#options;
    const { wireId: id, expiresAtMs, unattendedExpiresAtMs = expiresAtMs, traceparent } = order;
    const aheadMs = clock.now() - schedulerClockMs;
    const span = tracer?.start("kv.lease", {
      parent: traceparent,
      attributes: { "kv.wire_id": id, "kv.lease.granted_ms": expiresAtMs - schedulerClockMs },
    });
    this.#leases.get(id)?.timer?.cancel();
    const lease: Lease = {
      attendedMs: expiresAtMs + aheadMs,
      unattendedMs: unattendedExpiresAtMs + aheadMs,
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

  release(id: string): boolean {
    const lease = this.#leases.get(id);
    lease?.timer?.cancel();
    lease?.span?.end();
    return this.#leases.delete(id);
  }

  has(id: string): boolean {
    return this.#leases.has(id);
  }

  get size(): number {
    return this.#leases.size;
  }

  close(): void {
    for (const { timer } of this.#leases.values()) timer?.cancel();
    this.#leases.clear();
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

function end(lease: Lease): number {
  return lease.isAttended ? lease.attendedMs : lease.unattendedMs;
}

/** A request of P that peers send messages about. */
export interface GuardedRequest {
  readonly requestId: string;
  /** The request's capability; undefined where nothing but the id is known. */
  readonly capability?: string | undefined;
  /** Whether a peer has proved that it holds the request's parameters. */
  isProven: boolean;
}

/** Options of `MessageGuard`. */
export interface MessageGuardOptions {
  /** `require_kv_peer`: messages without a capability act on nothing. */
  readonly requiresKvPeer: boolean;
  /**
   * Gets one warning when a message in vLLM's form acts on a request, and one when a message is
   * refused; further refusals are for `debug`.
   */
  readonly log: Log;
}

/**
 * Decides whether a peer's message may act on a request of P: free its blocks or extend its lease.
 * A message with a capability must have the request's. One without, in vLLM's form, is accepted
 * only where plain vLLM peers are, and only until a peer has proved that it holds the request's
 * parameters: the request then belongs to an `@kv` D, which does not send this form.
 */
export class MessageGuard {
  readonly #options: MessageGuardOptions;
  #hasWarned = false;
  #hasRefused = false;

  constructor(options: MessageGuardOptions) {
    this.#options = options;
  }

  /**
   * Whether the message from the agent `from` may act on the request. `capability` is the
   * message's; undefined for vLLM's form.
   */
  mayAct(request: GuardedRequest, capability: string | undefined, from: string): boolean {
    const { log, requiresKvPeer } = this.#options;
    const { requestId } = request;
    if (capability !== undefined) {
      if (request.capability !== undefined && sameCapability(request.capability, capability)) {
        request.isProven = true;
        return true;
      }
      this.#refused("message-with-wrong-capability", { requestId, from });
      return false;
    }
    if (requiresKvPeer || request.isProven) {
      this.#refused("message-without-capability", { requestId, from, setting: "require_kv_peer" });
      return false;
    }
    if (!this.#hasWarned) {
      this.#hasWarned = true;
      log.warn("plain-peer-accepted", {
        requestId,
        from,
        consequence:
          "whoever reaches this agent and knows a request id can free or hold the request's blocks",
        remedy:
          "set kv_connector_extra_config.require_kv_peer to true where all decode workers are @kv",
      });
    }
    return true;
  }

  /** A flood of forged messages must not become a flood of log lines. */
  #refused(event: string, fields: LogFields): void {
    this.#options.log[this.#hasRefused ? "debug" : "warn"](event, fields);
    this.#hasRefused = true;
  }
}
