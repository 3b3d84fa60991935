import {
  createCompletions,
  createLeases,
  type LeaseOrder,
  type Outbox,
  type SendableRequest,
  type TransferMetrics,
} from "@kv/connector";
import type { Clock, Log } from "@kv/interface";

/**
 * The producer's half of a worker: counts the readers of each finished request, extends leases by heartbeats, and reports a
 * request as sent when all readers are done with this rank's part of it, or when its lease ran out.
 */
export interface PrefillWorker {
  step(step: PrefillWorkerStep): void;
  /** A reader, by its agent's name, is done with a request. */
  done(wireId: string, consumers: number, reader: string): void;
  heartbeat(wireIds: readonly string[]): void;
  outstanding(): { leases: number; completions: number; batch: number };
  close(): void;
}

export interface PrefillWorkerStep {
  readonly schedulerClockMs: number;
  readonly inBatch: readonly SendableRequest[];
  readonly notSent: readonly string[];
  readonly leases: readonly LeaseOrder[];
}

export interface PrefillWorkerOptions {
  readonly clock: Clock;
  readonly log: Log;
  readonly metrics: TransferMetrics;
  readonly outbox: Outbox;
  readonly extensionMs: number;
}

interface Sendable extends SendableRequest {
  /** All readers were done before the step that says that the request has finished: known only then to be true. */
  readEarly: boolean;
}

export function createPrefillWorker(options: PrefillWorkerOptions): PrefillWorker {
  const { clock, log, metrics, outbox, extensionMs } = options;
  // A request is known from the step that runs it, not from the one that finishes it: its parameters travel to a reader past
  // the steps, and the reader may be done first.
  const byWireId = new Map<string, Sendable>();
  const byRequestId = new Map<string, Sendable>();
  const completions = createCompletions({ log });
  const leases = createLeases({
    clock,
    extensionMs,
    onExpired(wireId) {
      const readers = completions.forget(wireId);
      const request = byWireId.get(wireId);
      metrics.leaseExpired();
      log.warn("lease-expired", { requestId: request?.requestId ?? wireId, readers });
      end(wireId, true);
    },
  });

  function end(wireId: string, sent: boolean): void {
    const request = byWireId.get(wireId);
    if (request === undefined) return;
    byWireId.delete(wireId);
    byRequestId.delete(request.requestId);
    if (sent) outbox.sent(request.requestId);
  }

  return {
    step({ schedulerClockMs, inBatch, notSent, leases: granted }) {
      for (const order of inBatch) {
        const request: Sendable = { ...order, readEarly: byWireId.get(order.wireId)?.readEarly ?? false };
        byWireId.set(order.wireId, request);
        byRequestId.set(order.requestId, request);
      }
      for (const requestId of notSent) {
        const request = byRequestId.get(requestId);
        if (request === undefined) continue;
        completions.forget(request.wireId);
        end(request.wireId, false);
      }
      const nowMs = clock.now();
      for (const order of granted) {
        const request = byWireId.get(order.wireId);
        if (request === undefined) continue;
        if (request.readEarly) {
          end(order.wireId, true);
          continue;
        }
        // What is left of the lease counts from here: the way from the scheduler only lengthens it, which is the safe side.
        const rebase = (atMs: number) => nowMs + (atMs - schedulerClockMs);
        leases.grant(order.wireId, {
          expiresAtMs: rebase(order.expiresAtMs),
          ...(order.unattendedExpiresAtMs === undefined
            ? {}
            : { unattendedExpiresAtMs: rebase(order.unattendedExpiresAtMs) }),
        });
      }
    },
    done(wireId, consumers, reader) {
      const request = byWireId.get(wireId);
      if (request === undefined) {
        metrics.notificationAfterExpiry();
        log.warn("notification-for-unknown-request", { requestId: wireId, reader });
        return;
      }
      if (request.readEarly) return;
      if (completions.note(wireId, reader, consumers) !== "complete") return;
      if (leases.release(wireId)) end(wireId, true);
      else request.readEarly = true;
    },
    heartbeat: (wireIds) => leases.extend(wireIds),
    outstanding: () => ({ leases: leases.size, completions: completions.size, batch: byWireId.size }),
    close() {
      leases.close();
      byWireId.clear();
      byRequestId.clear();
    },
  };
}
