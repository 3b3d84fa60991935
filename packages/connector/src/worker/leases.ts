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

type LeaseTerms = Pick<
  LeaseOrder,
  "wireId" | "expiresAtMs" | "unattendedExpiresAtMs" | "traceparent"
>;

/** Options of `Leases`. */
export interface LeasesOptions {
  readonly clock: Clock;
  /** Added by a heartbeat from its arrival. vLLM 0.33: two thirds of the lease. */
  readonly extensionMs: number;
  /** Gets a span per lease and an event per extension. */
  readonly tracer?: Tracer | undefined;
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
 * How long P's worker keeps finished requests' blocks. As in vLLM 0.33, a heartbeat moves the end
 * to `max(end, now + extension)` (lease 30 s, heartbeats every sixth, extension two thirds).
 */
export class Leases {
  readonly #options: LeasesOptions;
  readonly #leases = new Map<string, Lease>();

  constructor(options: LeasesOptions) {
    this.#options = options;
  }

  /**
   * The delay since `schedulerClockMs`, the scheduler's clock at the step, makes the lease longer,
   * which is safe.
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

  /** Ignores ids whose lease has ended or not arrived yet. */
  extend(ids: Iterable<string>): void {
    const extendedMs = this.#options.clock.now() + this.#options.extensionMs;
    for (const id of ids) {
      const lease = this.#leases.get(id);
      if (lease === undefined) continue;
      lease.isAttended = true;
      lease.attendedMs = Math.max(lease.attendedMs, extendedMs);
      lease.span?.event("extended", { "kv.lease.extension_ms": this.#options.extensionMs });
      // Checking again costs less than moving the timer at each heartbeat.
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

  /** Setting a timer costs the same with any number of leases. */
  #arm(id: string, lease: Lease): void {
    const { clock } = this.#options;
    lease.timer?.cancel();
    lease.timerAtMs = end(lease);
    // Below the clock's resolution, the timer would fire again and again.
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

export interface GuardedRequest {
  readonly requestId: string;
  /** Undefined where only the id is known. */
  readonly capability?: string | undefined;
  /** A peer has proved that it holds the request's parameters. */
  isProven: boolean;
}

/** Options of `MessageGuard`. */
export interface MessageGuardOptions {
  /** `require_kv_peer`: messages without a capability have no effect. */
  readonly requiresKvPeer: boolean;
  /** Gets one warning when a vLLM message acts, and one when a message is refused. */
  readonly log: Log;
}

/**
 * Decides which messages may act on P's requests. A capability must be the request's. A message
 * without one, as vLLM sends it, acts only where plain vLLM peers are accepted, and not once a peer
 * has proved that it holds the parameters: the request then belongs to an `@kv` D.
 */
export class MessageGuard {
  readonly #options: MessageGuardOptions;
  #hasWarned = false;
  #hasRefused = false;

  constructor(options: MessageGuardOptions) {
    this.#options = options;
  }

  /** `from`: the agent. `capability`: undefined in vLLM's form. */
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

  /** A flood of forged messages must not flood the log. */
  #refused(event: string, fields: LogFields): void {
    this.#options.log[this.#hasRefused ? "debug" : "warn"](event, fields);
    this.#hasRefused = true;
  }
}
