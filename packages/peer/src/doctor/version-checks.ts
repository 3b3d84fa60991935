import { type Check, check } from "../checks/report.js";
import type { Compatibility } from "./compatibility-checks.js";
import type { ServerFacts } from "./server-facts.js";
import { roundTripMs } from "./side-channel-checks.js";
import { pairVersionCheck, serverVersion, serverVersionCheck } from "./wire-version.js";

const MAX_WALL_SKEW_MS = 2000;
/** Half of the round trip bounds the error of a lease's end. */
const SLOW_ROUND_TRIP_MS = 500;

export function versionChecks({
  prefill,
  decode,
  compatibility: { factors },
}: {
  readonly prefill: ServerFacts;
  readonly decode?: ServerFacts;
  readonly compatibility: Compatibility;
}): Check[] {
  const ofPrefill = serverVersion(prefill, factors.prefill);
  const checks = serverVersionCheck(prefill, ofPrefill);
  if (decode === undefined) return checks;
  const ofDecode = serverVersion(decode, factors.decode);
  checks.push(...serverVersionCheck(decode, ofDecode), ...pairVersionCheck(ofPrefill, ofDecode));
  const [one, other] = [prefill.model?.id, decode.model?.id];
  if (one !== undefined && other !== undefined && one !== other)
    checks.push(
      check("versions.model", "model", "warn", `"${one}" at prefill and "${other}" at decode`, {
        fix: "give both the same --served-model-name: a proxy sends the same body to both",
      }),
    );
  const engineId = decode.metadata?.engineId;
  if (engineId !== undefined && engineId === prefill.metadata?.engineId)
    checks.push(
      check("versions.engines", "engines", "fail", `engine ${engineId} answers for both servers`, {
        fix: "both targets lead to the same side channel: give each server its own VLLM_NIXL_SIDE_CHANNEL_PORT",
      }),
    );
  return checks;
}

export function clockChecks({ role, wallClockMs, clockSamples = [] }: ServerFacts): Check[] {
  const checks: Check[] = [];
  if (clockSamples.length > 0) {
    const rttMs = Math.min(...clockSamples.map(roundTripMs));
    const found = `the end of a lease is known to within ${Math.max(0.1, rttMs / 2).toFixed(1)} ms (round trip ${rttMs.toFixed(1)} ms)`;
    const fix = "the server or the network is slow: raise kv_lease_duration";
    const [id, title] = [`clocks.${role}`, `clock of ${role}`] as const;
    checks.push(
      rttMs > SLOW_ROUND_TRIP_MS
        ? check(id, title, "warn", found, { fix })
        : check(id, title, "ok", found),
    );
  }
  if (wallClockMs === undefined) return checks;
  const { least, most } = wallClockMs;
  const offsetMs = least > 0 ? least : Math.max(0, -most);
  const [id, title] = [`clocks.${role}-wall`, `wall clock of ${role}`] as const;
  checks.push(
    offsetMs > MAX_WALL_SKEW_MS
      ? check(
          id,
          title,
          "warn",
          `at least ${(offsetMs / 1000).toFixed(1)} s ${least > 0 ? "ahead of" : "behind"} this host`,
          {
            fix: "run NTP: transfers do not depend on the wall clock, but traces and logs of the two servers do",
            details: { least, most },
          },
        )
      : check(
          id,
          title,
          "ok",
          `within ${MAX_WALL_SKEW_MS / 1000} s of this host; the header has whole seconds`,
          { details: { least, most } },
        ),
  );
  return checks;
}
