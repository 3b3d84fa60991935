import type { ClockOffset } from "@kv/connector/building-blocks";

/** Facts about one request's lease at a P that answers no lease queries. */
export interface LeaseDeadlineOptions {
  /** `remote_blocks_expiry_time` on P's clock; undefined when P sent none. */
  readonly expirySeconds: number | undefined;
  /** P's clock, from the handshake. */
  readonly clock: Pick<ClockOffset, "earliestLocalMs">;
  /** When D first saw the request, on the local clock. */
  readonly seenAtMs: number;
  /** Length of P's lease. Assumed to be equal to D's. */
  readonly leaseMs: number;
  /** How long a heartbeat extends the lease. */
  readonly extensionMs: number;
  /** Safety margin for notifications in flight and clock drift (vLLM: 5 s). */
  readonly marginMs: number;
  /** When the transport got heartbeats that name the request, ascending. */
  readonly heartbeatsAtMs: readonly number[];
}

/**
 * Returns until when a P that answers no lease queries is assumed to hold a request's blocks, in ms
 * on the local clock. A one-sided READ succeeds even when another request owns the blocks
 * meanwhile, so a READ that ends later is not used. A P of `@kv` is queried after the READ instead
 * (`queryLease`). Only a query detects blocks that were freed early because a retry gave the same
 * parameters to another reader.
 */
export function leaseDeadlineMs(options: LeaseDeadlineOptions): number {
  const { expirySeconds, clock, seenAtMs, leaseMs, extensionMs, marginMs, heartbeatsAtMs } =
    options;
  // A vLLM 0.33 P announces no expiry. Its lease counts from the end of the prefill, just before D
  // saw the request.
  const grantedMs =
    expirySeconds === undefined ? seenAtMs + leaseMs : clock.earliestLocalMs(expirySeconds);
  let deadlineMs = grantedMs - marginMs;
  for (const atMs of heartbeatsAtMs) {
    // A heartbeat after the deadline may have found no lease to extend.
    if (atMs > deadlineMs) break;
    deadlineMs = Math.max(deadlineMs, atMs + extensionMs - marginMs);
  }
  return deadlineMs;
}
