import { type Check, check } from "../checks/report.js";
import type { ServerFacts } from "./server-facts.js";
import { roundTripMs } from "./side-channel-checks.js";

export const DEFAULT_LEASE_MS = 30_000;
const MARGIN = 2;
const SLOW_ROUND_TRIP_MS = 500;

/**
 * In pull, D's heartbeats extend P's lease while D's engine steps. In push, vLLM's heartbeats do
 * not reach P's request (vllm-project/vllm#53244).
 */
export function leaseChecks(
  { remotePrefill }: ServerFacts,
  { queueTime }: ServerFacts,
  leaseMs: number,
): Check[] {
  if (queueTime === undefined) return [];
  const { requests, p99Seconds } = queueTime;
  const leaseSeconds = leaseMs / 1000;
  const isMeasured = Number.isFinite(p99Seconds);
  const limit = isMeasured ? `at most ${p99Seconds} s` : "longer than the metric's largest bucket";
  const found = `99 % of ${requests} requests waited ${limit} in the queue; a lease lasts ${leaseSeconds} s`;
  const details = { requests, p99Seconds: isMeasured ? p99Seconds : null, leaseSeconds };
  const neededSeconds = p99Seconds * MARGIN;
  if (neededSeconds <= leaseSeconds)
    return [check("decode.lease", "lease", "ok", found, undefined, details)];
  const but =
    remotePrefill?.transferMode === "push"
      ? "because vLLM's heartbeats do not extend a push lease"
      : "unless heartbeats of D arrive in time";
  const wanted = isMeasured ? `to at least ${Math.ceil(neededSeconds)}` : "further";
  const freed = `${found} (--lease): P frees the blocks of a request that waits longer, ${but}`;
  const fix = `raise kv_lease_duration in kv_connector_extra_config ${wanted} on both servers, or add decode servers`;
  return [check("decode.lease", "lease", "warn", freed, fix, details)];
}

export function clockChecks({ role, clockSamples = [] }: ServerFacts): Check[] {
  if (clockSamples.length === 0) return [];
  const rttMs = Math.min(...clockSamples.map(roundTripMs));
  const found = `the end of a lease is known to within ${Math.max(0.1, rttMs / 2).toFixed(1)} ms (round trip ${rttMs.toFixed(1)} ms)`;
  const isSlow = rttMs > SLOW_ROUND_TRIP_MS;
  const fix = isSlow ? "the server or the network is slow: raise kv_lease_duration" : undefined;
  return [check(`clocks.${role}`, `clock of ${role}`, isSlow ? "warn" : "ok", found, fix)];
}
