import {
  describedVersion,
  type Factors,
  NEWEST_VLLM_VERSION,
  VLLM_VERSIONS,
  type VllmVersion,
  type VllmWire,
  vllmWire,
} from "@kv/protocol";
import { type Check, check } from "../checks/report.js";
import type { ServerFacts } from "./server-facts.js";

export interface ServerVersion {
  /** As the server says it, or as its hash has it. */
  readonly vllm: string | undefined;
  /**
   * The described releases that it may be, oldest first; empty for a release that is not described.
   */
  readonly described: readonly VllmVersion[];
  /** Fields of its metadata that no described release has. */
  readonly unknownFields: readonly string[];
}

/** The described releases whose metadata has exactly these fields, oldest first. */
export function versionsWithFields(fields: readonly string[]): readonly VllmVersion[] {
  return VLLM_VERSIONS.filter((version) => {
    const names = fieldsOf(version);
    return names.length === fields.length && names.every((name) => fields.includes(name));
  });
}

function fieldsOf(version: VllmVersion): readonly string[] {
  return Object.keys(vllmWire(version)["agent metadata"]).filter((name) => name !== "class");
}

/**
 * A server's version: from `/version`, else from its hash, else from the fields of its metadata. An
 * engine that is not vLLM has a name of its own at `/version`, and its hash has the vLLM whose wire
 * it speaks.
 */
export function serverVersion(
  { vllmVersion, metadataFields = [] }: ServerFacts,
  factors: Factors,
): ServerVersion {
  const hashed = factors?.vllm_version;
  const isRelease = vllmVersion !== undefined && /^\d/.test(vllmVersion);
  const vllm = isRelease || typeof hashed !== "string" ? vllmVersion : hashed;
  const known = new Set(VLLM_VERSIONS.flatMap(fieldsOf));
  const unknownFields = metadataFields.filter((name) => !known.has(name));
  if (vllm === undefined)
    return { vllm, described: versionsWithFields(metadataFields), unknownFields };
  const described = describedVersion(vllm);
  return { vllm, described: described === undefined ? [] : [described], unknownFields };
}

const TESTED = VLLM_VERSIONS.filter(({ support }) => support === "transfers").map(
  ({ version }) => version,
);

/** Whether this program knows the version of one server. No check when nothing of it is known. */
export function serverVersionCheck(
  { role, metadataFields }: ServerFacts,
  version: ServerVersion,
): Check[] {
  const { vllm, described, unknownFields } = version;
  if (vllm === undefined && metadataFields === undefined) return [];
  const of = (status: "ok" | "warn", found: string, fix?: string, details?: Check["details"]) => [
    check(`versions.${role}`, `wire of ${role}`, status, found, { fix, details }),
  ];
  const newest = described.at(-1);
  const name = vllm ?? "its vLLM";
  if (newest === undefined || unknownFields.length > 0) {
    const known =
      newest === undefined ? `${name} is not among the described versions` : textOf(version);
    const unknown =
      unknownFields.length === 0
        ? ""
        : `; its metadata has unknown fields: ${unknownFields.slice(0, 20).join(", ")}; the others are read by name`;
    const fix = `upgrade @kv/peer; kv-peer wire on the wheel of ${name} lists what it changed`;
    return of("warn", `${known}${unknown}`, fix, { unknownFields });
  }
  if (described.some(({ support }) => support === "transfers")) return of("ok", textOf(version));
  return of(
    "warn",
    `${textOf(version)}: its handshake is read; transfers with this project are tested with ${TESTED.join(", ")}`,
    `upgrade it to vLLM ${NEWEST_VLLM_VERSION.version}`,
  );
}

/** Whether the two servers accept each other's version, and which of them has to be upgraded. */
export function pairVersionCheck(prefill: ServerVersion, decode: ServerVersion): Check[] {
  const of = (status: "ok" | "fail", found: string, fix?: string) => [
    check("versions.vllm", "vLLM", status, found, { fix }),
  ];
  if (prefill.vllm !== undefined && prefill.vllm === decode.vllm)
    return of("ok", `${prefill.vllm} on both`);
  const isKnown = prefill.vllm !== undefined && decode.vllm !== undefined;
  const [p, d] = [prefill.described.at(-1), decode.described.at(-1)];
  // Two sets of possible releases with a common one may be the same version.
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

/** "vLLM 0.29.0, connector version 9", or the releases that it may be. */
function textOf({ vllm, described }: ServerVersion): string {
  const [one] = described;
  if (vllm !== undefined)
    return one === undefined
      ? `vLLM ${vllm}`
      : `vLLM ${vllm}, connector version ${one.connectorVersion}`;
  if (described.length === 0) return "an unknown vLLM";
  return `vLLM ${described.map(({ version }) => version).join(" or ")} by the fields of its metadata`;
}

/**
 * What a release changed in messages that peers exchange, in one line; empty when they are the
 * same.
 */
function wireChanges(from: VllmWire, to: VllmWire): string {
  const sections = [
    "agent metadata",
    "cache layouts",
    "compatibility hash",
    "pull notifications",
  ] as const;
  const texts = sections.flatMap((section) => {
    const [before, after] = [from, to].map((wire) =>
      Object.keys(wire[section]).filter((name) => !name.includes(".")),
    ) as [string[], string[]];
    const parts = [
      ["gained", after.filter((name) => !before.includes(name))] as const,
      ["lost", before.filter((name) => !after.includes(name))] as const,
    ].filter(([, names]) => names.length > 0);
    const changes = parts.map(([change, names]) => `${change} ${names.join(", ")}`).join(" and ");
    return changes === "" ? [] : [`${section} ${changes}`];
  });
  return texts.join("; ");
}
