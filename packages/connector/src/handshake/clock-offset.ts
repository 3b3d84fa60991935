import { KvError } from "@kv/interface";

/**
 * One exchange with a peer whose reply has a clock: when the request was sent, when the reply
 * arrived, and the peer's clock in between.
 */
export interface ClockSample {
  /** When the request was sent, on the local clock. */
  readonly sentAtMs: number;
  /** When the reply arrived, on the local clock. */
  readonly receivedAtMs: number;
  /**
   * The peer's monotonic clock in seconds (vLLM: `time.perf_counter()` of the scheduler process).
   */
  readonly remoteSeconds: number;
}

/**
 * The estimated offset of a peer's clock. The peer's times are in seconds, as on the wire; local
 * times are in milliseconds.
 */
export interface ClockOffset {
  /** Estimate of remote minus local: remote − (sent + received) / 2. */
  readonly offsetMs: number;
  /**
   * Round trip of the sample that the estimate uses. The error of the estimate is at most half of
   * it.
   */
  readonly rttMs: number;
  /** Converts a time of the peer to the local clock, by the estimate. */
  toLocalMs(remoteSeconds: number): number;
  /**
   * Converts a time of the peer to a local time that is never later than the true one, for
   * deadlines.
   */
  earliestLocalMs(remoteSeconds: number): number;
}

/**
 * Estimates a peer's clock from the sample with the lowest round trip, as vLLM 0.33 does, because
 * slower samples are less exact. Errors: `KV_WIRE_MALFORMED` without a sample, for a number that is
 * not finite, and for a reply before its request.
 */
export function clockOffset(samples: readonly ClockSample[]): ClockOffset {
  let best: ClockSample | undefined;
  for (const sample of samples) {
    const { sentAtMs, receivedAtMs, remoteSeconds } = sample;
    if (
      ![sentAtMs, receivedAtMs, remoteSeconds].every(Number.isFinite) ||
      receivedAtMs < sentAtMs
    ) {
      throw new KvError(
        "KV_WIRE_MALFORMED",
        `clock sample is not usable: sent ${sentAtMs} ms, received ${receivedAtMs} ms, remote ${remoteSeconds} s`,
      );
    }
    if (best === undefined || rtt(sample) < rtt(best)) best = sample;
  }
  if (best === undefined)
    throw new KvError("KV_WIRE_MALFORMED", "a handshake without a clock sample");
  const { sentAtMs, receivedAtMs, remoteSeconds } = best;
  const offsetMs = remoteSeconds * 1000 - (sentAtMs + receivedAtMs) / 2;
  // The peer read its clock after the request was sent, so remote − local is at most this.
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
