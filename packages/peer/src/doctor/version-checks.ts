import { clockOffset } from "@kv/connector/building-blocks";
import type { Check } from "../report/check.js";
import type { Side } from "./side.js";

const MAX_WALL_SKEW_MS = 2000;
/** Half of it is how wrong the instant of a lease's end may be. */
const SLOW_ROUND_TRIP_MS = 500;

/** Versions, models and engines of the two sides beside one another. */
export function versionChecks(prefill: Side, decode: Side): Check[] {
  const checks: Check[] = [];
  const area = "versions" as const;
  const [p, d] = [prefill.vllmVersion, decode.vllmVersion];
  if (p !== undefined && d !== undefined) {
    const about = { id: "versions.vllm", area, title: "vLLM" };
    if (p === d) checks.push({ ...about, status: "ok", found: `${p} on both` });
    else {
      const found = `${p} at prefill and ${d} at decode: the version is in the compatibility hash, so they refuse one another`;
      checks.push({ ...about, status: "fail", found, fix: "run one version on both sides" });
    }
  }
  const [one, other] = [prefill.model?.id, decode.model?.id];
  if (one !== undefined && other !== undefined && one !== other) {
    checks.push({
      id: "versions.model",
      area,
      title: "model",
      status: "warn",
      found: `"${one}" at prefill and "${other}" at decode`,
      fix: "a proxy sends one body to both: give them the same --served-model-name",
    });
  }
  const [mine, theirs] = [decode.metadata?.engineId, prefill.metadata?.engineId];
  if (mine !== undefined && mine === theirs) {
    checks.push({
      id: "versions.engines",
      area,
      title: "engines",
      status: "fail",
      found: `one engine, ${mine}, answers for both sides`,
      fix: "the two targets lead to one side channel: give each server its own VLLM_NIXL_SIDE_CHANNEL_PORT",
    });
  }
  return checks;
}

/** Whether instants of one side mean the same on the other. */
export function clockChecks(sides: readonly Side[]): Check[] {
  const checks: Check[] = [];
  for (const { role, wallClockMs, clockSamples } of sides) {
    const about = { id: `clocks.${role}`, area: "clocks" as const, title: `clock of ${role}` };
    if (clockSamples.length > 0) {
      const { rttMs } = clockOffset(clockSamples);
      const slow = rttMs > SLOW_ROUND_TRIP_MS;
      checks.push({
        ...about,
        status: slow ? "warn" : "ok",
        found: `leases are read to within ${Math.max(0.1, rttMs / 2).toFixed(1)} ms (round trip ${rttMs.toFixed(1)} ms)`,
        ...(slow ? { fix: "the server or the way to it is slow: raise kv_lease_duration" } : {}),
      });
    }
    if (wallClockMs === undefined) continue;
    const { least, most } = wallClockMs;
    const apart = least > 0 ? least : most < 0 ? -most : 0;
    checks.push({
      ...about,
      id: `clocks.${role}-wall`,
      title: `wall clock of ${role}`,
      status: apart > MAX_WALL_SKEW_MS ? "warn" : "ok",
      found:
        apart > MAX_WALL_SKEW_MS
          ? `at least ${(apart / 1000).toFixed(1)} s ${least > 0 ? "ahead of" : "behind"} this host`
          : `within ${MAX_WALL_SKEW_MS / 1000} s of this host, as far as whole seconds tell`,
      ...(apart > MAX_WALL_SKEW_MS
        ? { fix: "run NTP: transfers do not depend on it, traces and logs of the two sides do" }
        : {}),
      details: { least, most },
    });
  }
  return checks;
}
