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
  /** The message, such as "agent metadata"; "connector" for the connector version. */
  readonly section: string;
  /** The name in the described version, or of a new entry. */
  readonly name: string;
  /** `missing`: the whole section was not found in the sources. */
  readonly change: "added" | "removed" | "renamed" | "changed" | "missing";
  /** The form in the described version; the name when it is renamed. */
  readonly before?: string | undefined;
  /** The form in the sources; the new name when it is renamed. */
  readonly after?: string | undefined;
}

export interface WireReport {
  readonly vllm: string | null;
  /** The sources' `NIXL_CONNECTOR_VERSION`; null when it was not found. */
  readonly connectorVersion: number | null;
  /** The described version with the same release number, else the most similar one. */
  readonly comparedWith: VllmVersion;
  readonly differences: readonly WireDifference[];
  /**
   * Whether clients' requests were compared too. False where the sources have no API server, and
   * for a version whose requests are not described.
   */
  readonly requestsCompared: boolean;
}

/**
 * Compares what was read with the described versions. Requests are compared with those of the same
 * version; of a version that is not described, a name is new when no described version has it.
 * Throws nothing.
 */
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

/**
 * A check as `vllm-checks.json` has it. Python versions differ in where they put quotes and
 * parentheses.
 */
export function checkDigest(check: string): string {
  return createHash("sha256")
    .update(check.replaceAll(/[\s'"()\\]/g, ""))
    .digest("hex")
    .slice(0, 8);
}

/**
 * The checks that the same release does not have; of another release, those that no release has
 * whose checks are known. `tools/vllm/request-members.ts` writes them down.
 */
function newChecks(same: VllmVersion | undefined, { checks }: WireReading): WireDifference[] {
  const releases: Readonly<Record<string, string>> = CHECKS;
  const known = same === undefined ? Object.values(releases).join(" ") : releases[same.version];
  if (known === undefined) return [];
  const digests = new Set(known.split(" "));
  return checks
    .filter((check) => !digests.has(checkDigest(check)))
    .map((name) => ({ section: "check", name, change: "added" as const, after: "" }));
}

/** Undefined where there is nothing to compare. */
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
    // A member that is gone may be one of an older version.
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
    // An entry of the same form at the same place is the same one under another name.
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

/** The entry before `name` that both versions have; undefined at the beginning. */
function commonBefore(name: string, own: Entries, other: Entries): string | undefined {
  const names = Object.keys(own);
  return names.slice(0, names.indexOf(name)).findLast((each) => Object.hasOwn(other, each));
}
