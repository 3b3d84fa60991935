import { KvError } from "@kv/interface";

/** One exchange with a peer that told its clock: when the request left, when the reply came, what the peer's clock said between. */
export interface ClockSample {
  /** When the request left, on the local clock. */
  readonly sentAtMs: number;
  /** When the reply came, on the local clock. */
  readonly receivedAtMs: number;
  /** The peer's monotonic clock in seconds (vLLM: `time.perf_counter()` of the scheduler process). */
  readonly remoteSeconds: number;
}

/** What is known of a peer's clock. Instants of the peer are seconds, as on the wire; local ones are milliseconds. */
export interface ClockOffset {
  /** Estimate of remote minus local: remote − (sent + received) / 2. */
  readonly offsetMs: number;
  /** Of the sample that the estimate is made of; the error of the estimate is at most half of it. */
  readonly rttMs: number;
  /** The local instant that the estimate gives. */
  toLocalMs(remoteSeconds: number): number;
  /** No later than the true local instant, whatever the two ways of the exchange took: what a deadline is compared with. */
  earliestLocalMs(remoteSeconds: number): number;
}

/**
 * Estimates a peer's clock from the sample with the lowest round trip, as vLLM 0.33 does: what a slower one adds is noise.
 * Errors: `KV_WIRE_MALFORMED` for no sample or one that is not of finite numbers in order.
 */
export function clockOffset(samples: readonly ClockSample[]): ClockOffset {
  let best: ClockSample | undefined;
  for (const sample of samples) {
    const { sentAtMs, receivedAtMs, remoteSeconds } = sample;
    if (![sentAtMs, receivedAtMs, remoteSeconds].every(Number.isFinite) || receivedAtMs < sentAtMs) {
      throw new KvError(
        "KV_WIRE_MALFORMED",
        `clock sample is not usable: sent ${sentAtMs} ms, received ${receivedAtMs} ms, remote ${remoteSeconds} s`,
      );
    }
    if (best === undefined || rtt(sample) < rtt(best)) best = sample;
  }
  if (best === undefined) throw new KvError("KV_WIRE_MALFORMED", "a handshake without a clock sample");
  const { sentAtMs, receivedAtMs, remoteSeconds } = best;
  const offsetMs = remoteSeconds * 1000 - (sentAtMs + receivedAtMs) / 2;
  // The peer read its clock after we sent: remote − local is at most this.
  const greatestOffsetMs = remoteSeconds * 1000 - sentAtMs;
  return {
    offsetMs,
    rttMs: rtt(best),
    toLocalMs: (seconds) => seconds * 1000 - offsetMs,
    earliestLocalMs: (seconds) => seconds * 1000 - greatestOffsetMs,
  };
}

function rtt(sample: ClockSample): number {
  return sample.receivedAtMs - sample.sentAtMs;
}
