import { type Check, check } from "../checks/report.js";
import type { ServerFacts } from "./server-facts.js";

/** vLLM's default of `kv_lease_duration`. */
export const DEFAULT_LEASE_MS = 30_000;
/** A lease must outlive a request in the queue of D, the handshake, and the transfer. */
const MARGIN = 2;

/**
 * Compares the lease with the time that requests wait in the decode server's queue. P keeps a
 * request's blocks for a lease. In pull, heartbeats of D extend it while D's engine steps. In push,
 * vLLM's heartbeats do not reach P's request (vllm-project/vllm#53244).
 */
export function leaseChecks({
  prefill,
  decode: { queueTime },
  leaseMs,
}: {
  readonly prefill: ServerFacts;
  readonly decode: ServerFacts;
  readonly leaseMs: number;
}): Check[] {
  if (queueTime === undefined) return [];
  const { requests, p99Seconds } = queueTime;
  const leaseSeconds = leaseMs / 1000;
  const isMeasured = Number.isFinite(p99Seconds);
  const limit = isMeasured ? `at most ${p99Seconds} s` : "longer than the metric's largest bucket";
  const found = `99 % of ${requests} requests waited ${limit} in the queue; a lease lasts ${leaseSeconds} s`;
  const details = { requests, p99Seconds: isMeasured ? p99Seconds : null, leaseSeconds };
  if (p99Seconds * MARGIN <= leaseSeconds)
    return [check("decode.lease", "lease", "ok", found, { details })];
  const but =
    prefill.remotePrefill?.transferMode === "push"
      ? "because vLLM's heartbeats do not extend a push lease"
      : "unless heartbeats of D arrive in time";
  const wanted = isMeasured ? `to at least ${Math.ceil(p99Seconds * MARGIN)}` : "further";
  return [
    check(
      "decode.lease",
      "lease",
      "warn",
      `${found} (--lease): P frees the blocks of a request that waits longer, ${but}`,
      {
        fix: `raise kv_lease_duration in kv_connector_extra_config ${wanted} on both servers, or add decode servers`,
        details,
      },
    ),
  ];
}
