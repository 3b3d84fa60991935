import type { Check } from "./pair-report.js";
import type { ServerFacts } from "./server-facts.js";

/** vLLM's default of `kv_lease_duration`. */
const DEFAULT_LEASE_MS = 30_000;
/** A lease must outlive a request in the queue of D, the handshake, and the transfer. */
const MARGIN = 2;

/**
 * Compares the lease with the time that requests wait in the decode server's queue. P keeps a
 * request's blocks for a lease. In pull, heartbeats of D extend it while D's engine steps. In push,
 * vLLM's heartbeats do not reach P's request (vllm-project/vllm#53244).
 */
export function leaseChecks(
  prefill: Pick<ServerFacts, "remotePrefill">,
  decode: Pick<ServerFacts, "queueTime">,
  leaseMs = DEFAULT_LEASE_MS,
): Check[] {
  const { queueTime } = decode;
  if (queueTime === undefined) return [];
  const about = { id: "decode.lease", area: "decode" as const, title: "lease" };
  const { requests, p99Seconds } = queueTime;
  const leaseSeconds = leaseMs / 1000;
  const limit = Number.isFinite(p99Seconds)
    ? `at most ${p99Seconds} s`
    : "longer than the metric's largest bucket";
  const waited = `99 % of ${requests} requests waited ${limit} in the queue`;
  const details = {
    requests,
    p99Seconds: Number.isFinite(p99Seconds) ? p99Seconds : null,
    leaseSeconds,
  };
  if (p99Seconds * MARGIN <= leaseSeconds)
    return [
      { ...about, status: "ok", found: `${waited}; a lease lasts ${leaseSeconds} s`, details },
    ];
  const isPush = prefill.remotePrefill?.transferMode === "push";
  const consequence = isPush
    ? "P frees the blocks of a request that waits longer, because vLLM's heartbeats do not extend a push lease"
    : "P frees the blocks of a request that waits longer, unless heartbeats of D arrive in time";
  const wanted = Number.isFinite(p99Seconds)
    ? `to at least ${Math.ceil(p99Seconds * MARGIN)}`
    : "further";
  return [
    {
      ...about,
      status: "warn",
      found: `${waited}; a lease lasts ${leaseSeconds} s (--lease): ${consequence}`,
      fix: `raise kv_lease_duration in kv_connector_extra_config ${wanted} on both servers, or add decode servers`,
      details,
    },
  ];
}
