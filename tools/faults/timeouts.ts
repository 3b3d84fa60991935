import type { FaultTimes } from "@kv/testing/faults/fault-client";

/**
 * Timeouts of fault runs with the real clock. They are short, so that a lost message is given up
 * soon. The deadline is generous, for a machine that stalls now and then; a request that waits for
 * ever still exceeds it.
 */
export const REAL_CLOCK_TIMEOUTS: FaultTimes = {
  leaseMs: 4000,
  requestTimeoutMs: 5000,
  deadlineMs: 120_000,
  longMs: 5000,
};
