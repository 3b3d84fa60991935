import {
  describedVersion,
  type Factors,
  NEWEST_VLLM_VERSION,
  VLLM_VERSIONS,
  type VllmVersion,
  type VllmWire,
  vllmWire,
} from "@kv/protocol";
import { type Check, check, type Role } from "../checks/report.js";
import type { ServerFacts } from "./server-facts.js";

interface ServerVersion {
  readonly vllm: string | undefined;
  /** Oldest first; empty for a release that is not described. */
  readonly described: readonly VllmVersion[];
  readonly unknownFields: readonly string[];
}

export function versionsWithFields(fields: readonly string[]): readonly VllmVersion[] {
  const wanted = [...fields].sort().join();
  return VLLM_VERSIONS.filter((version) => fieldsOf(version).sort().join() === wanted);
}

function fieldsOf(version: VllmVersion): string[] {
  return Object.keys(vllmWire(version)["agent metadata"]).filter((name) => name !== "class");
}

/**
 * Tries `/version`, the hash, then the metadata's fields. The hash of another engine names the vLLM
 * whose wire it speaks.
 */
export function serverVersion(
  { vllmVersion, metadataFields = [] }: ServerFacts,
  factors: Factors,
): ServerVersion {
  const hashed = factors?.vllm_version;
  const isRelease = vllmVersion !== undefined && /^\d/.test(vllmVersion);
  const vllm = isRelease || typeof hashed !== "string" ? vllmVersion : hashed;
  const known = VLLM_VERSIONS.flatMap(fieldsOf);
  const unknownFields = metadataFields.filter((name) => !known.includes(name));
  const named = vllm === undefined ? undefined : describedVersion(vllm);
  const described =
    vllm === undefined ? versionsWithFields(metadataFields) : [named].filter((each) => !!each);
  return { vllm, described, unknownFields };
}

const TESTED = VLLM_VERSIONS.filter(({ support }) => support === "transfers");

export function versionChecks(
  prefill: ServerFacts,
  decode: ServerFacts | undefined,
  factors: Readonly<Record<Role, Factors>>,
): Check[] {
  const ofPrefill = serverVersion(prefill, factors.prefill);
  const checks = serverVersionCheck(prefill, ofPrefill);
  if (decode === undefined) return checks;
  const ofDecode = serverVersion(decode, factors.decode);
  checks.push(...serverVersionCheck(decode, ofDecode), ...pairVersionCheck(ofPrefill, ofDecode));
  const [one, other] = [prefill.model?.id, decode.model?.id];
  if (one !== undefined && other !== undefined && one !== other) {
    const fix = "give both the same --served-model-name: a proxy sends the same body to both";
    const found = `"${one}" at prefill and "${other}" at decode`;
    checks.push(check("versions.model", "model", "warn", found, fix));
  }
  const engineId = decode.metadata?.engineId;
  if (engineId !== undefined && engineId === prefill.metadata?.engineId) {
    const fix =
      "both targets lead to the same side channel: give each server its own VLLM_NIXL_SIDE_CHANNEL_PORT";
    const found = `engine ${engineId} answers for both servers`;
    checks.push(check("versions.engines", "engines", "fail", found, fix));
  }
  return checks;
}

function serverVersionCheck(
  { role, metadataFields }: ServerFacts,
  version: ServerVersion,
): Check[] {
  const { vllm, described, unknownFields } = version;
  if (vllm === undefined && metadataFields === undefined) return [];
  const [id, title] = [`versions.${role}`, `wire of ${role}`] as const;
  const name = vllm ?? "its vLLM";
  if (described.length === 0 || unknownFields.length > 0) {
    const known =
      described.length === 0 ? `${name} is not among the described versions` : textOf(version);
    const unknown =
      unknownFields.length === 0
        ? ""
        : `; its metadata has unknown fields: ${unknownFields.slice(0, 20).join(", ")}; the others are read by name`;
    const fix = `upgrade @kv/peer; kv-peer wire on the wheel of ${name} lists what it changed`;
    return [check(id, title, "warn", `${known}${unknown}`, fix, { unknownFields })];
  }
  if (described.some((each) => TESTED.includes(each)))
    return [check(id, title, "ok", textOf(version))];
  const tested = TESTED.map((each) => each.version).join(", ");
  const found = `${textOf(version)}: its handshake is read; transfers with this project are tested with ${tested}`;
  const fix = `upgrade it to vLLM ${NEWEST_VLLM_VERSION.version}`;
  return [check(id, title, "warn", found, fix)];
}

function pairVersionCheck(prefill: ServerVersion, decode: ServerVersion): Check[] {
  const of = (status: "ok" | "fail", found: string, fix?: string) => [
    check("versions.vllm", "vLLM", status, found, fix),
  ];
  if (prefill.vllm !== undefined && prefill.vllm === decode.vllm)
    return of("ok", `${prefill.vllm} on both`);
  const isKnown = prefill.vllm !== undefined && decode.vllm !== undefined;
  const [p, d] = [prefill.described.at(-1), decode.described.at(-1)];
  // A common release may be the version of both.
  const mayBeEqual = prefill.described.some((each) => decode.described.includes(each));
  if (!isKnown && (p === undefined || d === undefined || mayBeEqual)) return [];
  const name = (version: ServerVersion) => version.vllm ?? textOf(version);
  const found = `${name(prefill)} at prefill and ${name(decode)} at decode: the compatibility hash contains the version, so the handshake is refused`;
  if (p === undefined || d === undefined || p === d)
    return of("fail", found, "run one version on both sides");
  const isOlder = VLLM_VERSIONS.indexOf(p) < VLLM_VERSIONS.indexOf(d);
  const [role, from, to] = isOlder ? (["prefill", p, d] as const) : (["decode", d, p] as const);
  const target = (isOlder ? decode : prefill).vllm ?? to.version;
  const changes = wireChanges(vllmWire(from), vllmWire(to));
  return of(
    "fail",
    changes === "" ? found : `${found}\nfrom ${from.version} to ${to.version}, ${changes}`,
    `run one version on both sides: upgrade ${role} to vLLM ${target}`,
  );
}

function textOf({ vllm, described }: ServerVersion): string {
  const [one] = described;
  const connector = one === undefined ? "" : `, connector version ${one.connectorVersion}`;
  if (vllm !== undefined) return `vLLM ${vllm}${connector}`;
  if (described.length === 0) return "an unknown vLLM";
  return `vLLM ${described.map(({ version }) => version).join(" or ")} by the fields of its metadata`;
}

function wireChanges(from: VllmWire, to: VllmWire): string {
  const sections = [
    "agent metadata",
    "cache layouts",
    "compatibility hash",
    "pull notifications",
  ] as const;
  return sections
    .flatMap((section) => {
      const names = (wire: VllmWire) =>
        Object.keys(wire[section]).filter((name) => !name.includes("."));
      const [before, after] = [names(from), names(to)];
      const gained = after.filter((name) => !before.includes(name));
      const lost = before.filter((name) => !after.includes(name));
      const changes = [
        ...(gained.length > 0 ? [`gained ${gained.join(", ")}`] : []),
        ...(lost.length > 0 ? [`lost ${lost.join(", ")}`] : []),
      ];
      return changes.length > 0 ? [`${section} ${changes.join(" and ")}`] : [];
    })
    .join("; ");
}
