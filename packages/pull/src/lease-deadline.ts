import type { ClockOffset } from "@kv/connector";

/**
 * Until when a producer that cannot be asked is taken to keep a request's blocks, on the local clock. A one-sided READ
 * succeeds whether or not the blocks have gone to another request meanwhile; one that ends later than this is not used.
 *
 * A producer of ours is asked instead, after the READ (`leases-check`): only that tells of blocks that went early because another
 * reader, given the same parameters by a retry, was done with them.
 */
export interface LeaseTrustOptions {
  /** `remote_blocks_expiry_time`, where the producer gave one. */
  readonly expirySeconds: number | undefined;
  readonly clock: Pick<ClockOffset, "earliestLocalMs">;
  /** When this side first saw the request, on the local clock. */
  readonly seenAtMs: number;
  readonly leaseMs: number;
  readonly extensionMs: number;
  /** Kept back for what is on its way, and for clocks that run apart (vLLM: 5 s). */
  readonly marginMs: number;
  /** When heartbeats that name the request were handed to the transport, ascending. */
  readonly heartbeatsAtMs: readonly number[];
}

export function keptUntilMs(options: LeaseTrustOptions): number {
  const { expirySeconds, clock, seenAtMs, leaseMs, extensionMs, marginMs, heartbeatsAtMs } = options;
  // A vLLM 0.33 prefill worker announces no expiry: its lease counts from the end of the prefill, just before this side saw
  // the request.
  const grantedMs = expirySeconds === undefined ? seenAtMs + leaseMs : clock.earliestLocalMs(expirySeconds);
  let untilMs = grantedMs - marginMs;
  for (const atMs of heartbeatsAtMs) {
    // One that came too late found nothing to extend.
    if (atMs > untilMs) break;
    untilMs = Math.max(untilMs, atMs + extensionMs - marginMs);
  }
  return untilMs;
}
