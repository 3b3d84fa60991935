import { createHash } from "node:crypto";
import {
  describedVersion,
  VLLM_VERSIONS,
  type VllmVersion,
  vllmRequests,
  vllmWire,
} from "@kv/protocol";
import type { WireReading } from "./read-wire.js";
import CHECKS from "./vllm-checks.json" with { type: "json" };

export interface WireDifference {
  readonly section: string;
  readonly name: string;
  /** `missing`: the whole section. */
  readonly change: "added" | "removed" | "renamed" | "changed" | "missing";
  readonly before?: string | undefined;
  readonly after?: string | undefined;
}

export interface WireReport {
  readonly vllm: string | null;
  readonly connectorVersion: number | null;
  /** With the same release number, else the most similar one. */
  readonly comparedWith: VllmVersion;
  readonly differences: readonly WireDifference[];
  /** False without an API server or a description of the version's requests. */
  readonly requestsCompared: boolean;
}

/** In an undescribed version, a request's name is new when no described one has it. */
export function compareWire(reading: WireReading): WireReport {
  const { vllm, connectorVersion } = reading;
  const same = vllm === null ? undefined : describedVersion(vllm);
  const candidates = same === undefined ? [...VLLM_VERSIONS].reverse() : [same];
  const [best, ...others] = candidates.map((version) => ({
    comparedWith: version,
    differences: differencesFrom(version, reading),
  }));
  if (best === undefined) throw new RangeError("no version is described");
  // Among equally similar versions the newest.
  const closest = others.reduce(
    (found, each) => (each.differences.length < found.differences.length ? each : found),
    best,
  );
  const requests = requestDifferences(same, reading);
  const differences = [...closest.differences, ...(requests ?? []), ...newChecks(same, reading)];
  return {
    vllm,
    connectorVersion,
    ...closest,
    differences,
    requestsCompared: requests !== undefined,
  };
}

/** Ignores quotes and parentheses, which Python versions place differently. */
export function checkDigest(check: string): string {
  return createHash("sha256")
    .update(check.replaceAll(/[\s'"()\\]/g, ""))
    .digest("hex")
    .slice(0, 8);
}

/** For an unknown release, the checks that no known one has. */
function newChecks(same: VllmVersion | undefined, { checks }: WireReading): WireDifference[] {
  const releases: Readonly<Record<string, string>> = CHECKS;
  const known = same === undefined ? Object.values(releases).join(" ") : releases[same.version];
  if (known === undefined) return [];
  const digests = new Set(known.split(" "));
  return checks
    .filter((check) => !digests.has(checkDigest(check)))
    .map((name) => ({ section: "check", name, change: "added" as const, after: "" }));
}

function requestDifferences(
  same: VllmVersion | undefined,
  { requests }: WireReading,
): WireDifference[] | undefined {
  const described =
    same === undefined ? [...vllmRequests().values()] : [vllmRequests().get(same.version)];
  if (requests === null || described[0] === undefined) return undefined;
  return [...new Set(described.flatMap((each) => Object.keys(each ?? {})))].flatMap((section) => {
    const after = requests[section];
    if (after === undefined) return [{ section, name: "all entries", change: "missing" as const }];
    const before = new Set(described.flatMap((each) => each?.[section] ?? []));
    const named = (names: Iterable<string>) =>
      Object.fromEntries(Array.from(names, (name) => [name, ""]));
    const differences = compareSection(section, named(before), named(after));
    // It may be gone from an older version.
    return same === undefined
      ? differences.filter(({ change }) => change !== "removed")
      : differences;
  });
}

function differencesFrom(
  version: VllmVersion,
  { connectorVersion, wire }: WireReading,
): WireDifference[] {
  const differences: WireDifference[] = [];
  if (connectorVersion !== version.connectorVersion) {
    differences.push({
      section: "connector",
      name: "NIXL_CONNECTOR_VERSION",
      change: connectorVersion === null ? "missing" : "changed",
      before: String(version.connectorVersion),
      after: connectorVersion === null ? undefined : String(connectorVersion),
    });
  }
  const described: Readonly<Record<string, Entries>> = vllmWire(version);
  for (const section of new Set([...Object.keys(described), ...Object.keys(wire)])) {
    const before = described[section] ?? {};
    const after = wire[section];
    if (after === undefined) differences.push({ section, name: "all entries", change: "missing" });
    else differences.push(...compareSection(section, before, after));
  }
  return differences;
}

type Entries = Readonly<Record<string, string>>;

function compareSection(section: string, before: Entries, after: Entries): WireDifference[] {
  const added = Object.keys(after).filter((name) => !Object.hasOwn(before, name));
  const differences: WireDifference[] = [];
  for (const [name, form] of Object.entries(before)) {
    const now = Object.hasOwn(after, name) ? after[name] : undefined;
    if (now === form) continue;
    if (now !== undefined) {
      differences.push({ section, name, change: "changed", before: form, after: now });
      continue;
    }
    const renamed = added.find(
      (each) =>
        after[each] === form &&
        commonBefore(each, after, before) === commonBefore(name, before, after),
    );
    if (renamed === undefined) differences.push({ section, name, change: "removed", before: form });
    else {
      added.splice(added.indexOf(renamed), 1);
      differences.push({ section, name, change: "renamed", before: name, after: renamed });
    }
  }
  for (const name of added)
    differences.push({ section, name, change: "added", after: after[name] });
  return differences;
}

function commonBefore(name: string, own: Entries, other: Entries): string | undefined {
  const names = Object.keys(own);
  return names.slice(0, names.indexOf(name)).findLast((each) => Object.hasOwn(other, each));
}
