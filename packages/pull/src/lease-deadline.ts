import type { ClockOffset } from "@kv/connector/building-blocks";

/** Facts about one request's lease at a P that cannot be asked. */
export interface LeaseDeadlineOptions {
  /** `remote_blocks_expiry_time` on P's clock; undefined where P gave none. */
  readonly expirySeconds: number | undefined;
  /** P's clock, from the handshake. */
  readonly clock: Pick<ClockOffset, "earliestLocalMs">;
  /** When D first saw the request, on the local clock. */
  readonly seenAtMs: number;
  /** P's lease, taken to be as long as D's. */
  readonly leaseMs: number;
  /** What a heartbeat adds. */
  readonly extensionMs: number;
  /** Subtracted for notifications under way and clock drift (vLLM: 5 s). */
  readonly marginMs: number;
  /** When heartbeats that name the request were handed to the transport, ascending. */
  readonly heartbeatsAtMs: readonly number[];
}

/**
 * Until when a P that cannot be asked is assumed to keep a request's blocks, in ms on the local clock. A one-sided READ succeeds even when
 * the blocks have gone to another request meanwhile, so a READ that ends later is not used. A P of `@kv` is asked after the READ instead
 * (`queryLease`): only that reveals blocks that were freed early because another reader, given the same parameters by a retry, was done.
 */
export function leaseDeadlineMs(options: LeaseDeadlineOptions): number {
  const { expirySeconds, clock, seenAtMs, leaseMs, extensionMs, marginMs, heartbeatsAtMs } = options;
  // A vLLM 0.33 P announces no expiry. Its lease counts from the end of the prefill, just before D saw the request.
  const grantedMs = expirySeconds === undefined ? seenAtMs + leaseMs : clock.earliestLocalMs(expirySeconds);
  let deadlineMs = grantedMs - marginMs;
  for (const atMs of heartbeatsAtMs) {
    // A heartbeat after the deadline may have found no lease to extend.
    if (atMs > deadlineMs) break;
    deadlineMs = Math.max(deadlineMs, atMs + extensionMs - marginMs);
  }
  return deadlineMs;
}
