import type { Factors } from "@kv/protocol";
import type { Check } from "./pair-report.js";
import type { ServerFacts } from "./server-facts.js";
import { roundTripMs } from "./side-channel-checks.js";
import { pairVersionCheck, serverVersion, serverVersionCheck } from "./wire-version.js";

const MAX_WALL_SKEW_MS = 2000;
/** Half of the round trip bounds the error of a lease's end. */
const SLOW_ROUND_TRIP_MS = 500;

/**
 * Checks the version of each server, and compares versions, models and engine ids. `factors`: those
 * of the two hashes.
 */
export function versionChecks(
  prefill: ServerFacts,
  decode: ServerFacts | undefined,
  factors: { readonly prefill: Factors; readonly decode: Factors },
): Check[] {
  const area = "versions" as const;
  const ofPrefill = serverVersion(prefill, factors.prefill);
  const checks: Check[] = serverVersionCheck(prefill, ofPrefill);
  if (decode === undefined) return checks;
  const ofDecode = serverVersion(decode, factors.decode);
  checks.push(...serverVersionCheck(decode, ofDecode), ...pairVersionCheck(ofPrefill, ofDecode));
  const [one, other] = [prefill.model?.id, decode.model?.id];
  if (one !== undefined && other !== undefined && one !== other) {
    checks.push({
      id: "versions.model",
      area,
      title: "model",
      status: "warn",
      found: `"${one}" at prefill and "${other}" at decode`,
      fix: "give both the same --served-model-name: a proxy sends the same body to both",
    });
  }
  const [mine, theirs] = [decode.metadata?.engineId, prefill.metadata?.engineId];
  if (mine !== undefined && mine === theirs) {
    checks.push({
      id: "versions.engines",
      area,
      title: "engines",
      status: "fail",
      found: `engine ${mine} answers for both servers`,
      fix: "both targets lead to the same side channel: give each server its own VLLM_NIXL_SIDE_CHANNEL_PORT",
    });
  }
  return checks;
}

/** Reports how precisely lease times are known, and whether the wall clocks agree. */
export function clockChecks(sides: readonly ServerFacts[]): Check[] {
  const checks: Check[] = [];
  for (const { role, wallClockMs, clockSamples } of sides) {
    const about = { id: `clocks.${role}`, area: "clocks" as const, title: `clock of ${role}` };
    if (clockSamples.length > 0) {
      const rttMs = Math.min(...clockSamples.map(roundTripMs));
      const slow = rttMs > SLOW_ROUND_TRIP_MS;
      checks.push({
        ...about,
        status: slow ? "warn" : "ok",
        found: `the end of a lease is known to within ${Math.max(0.1, rttMs / 2).toFixed(1)} ms (round trip ${rttMs.toFixed(1)} ms)`,
        fix: slow ? "the server or the network is slow: raise kv_lease_duration" : undefined,
      });
    }
    if (wallClockMs === undefined) continue;
    const { least, most } = wallClockMs;
    const offsetMs = least > 0 ? least : most < 0 ? -most : 0;
    const isOff = offsetMs > MAX_WALL_SKEW_MS;
    checks.push({
      ...about,
      id: `clocks.${role}-wall`,
      title: `wall clock of ${role}`,
      status: isOff ? "warn" : "ok",
      found: isOff
        ? `at least ${(offsetMs / 1000).toFixed(1)} s ${least > 0 ? "ahead of" : "behind"} this host`
        : `within ${MAX_WALL_SKEW_MS / 1000} s of this host; the header has whole seconds`,
      fix: isOff
        ? "run NTP: transfers do not depend on the wall clock, but traces and logs of the two servers do"
        : undefined,
      details: { least, most },
    });
  }
  return checks;
}
