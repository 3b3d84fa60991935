import {
  compareFactors,
  compatibilityHash,
  explainCompatibility,
  type FactorCandidates,
  type FactorDifference,
  type Factors,
  findHashFactors,
  type HandshakePayload,
  type HashSearch,
  modelForms,
  speculativeForms,
} from "@kv/protocol";
import { type Check, check, type Role } from "../checks/report.js";
import factorFixes from "./factor-fixes.json" with { type: "json" };
import type { ServerFacts } from "./server-facts.js";
import { versionsWithFields } from "./versions.js";

interface CompatibilityOptions {
  readonly knownFactors: Readonly<Record<string, unknown>>;
  readonly tpOf: (server: ServerFacts) => number;
}

export interface Compatibility {
  readonly checks: readonly Check[];
  readonly factors: Readonly<Record<Role, Factors>>;
}

interface Side {
  readonly hash: string;
  readonly factors: Factors;
  readonly candidates: FactorCandidates;
}

export function compatibilityChecks(
  prefill: ServerFacts,
  decode: ServerFacts | undefined,
  options: CompatibilityOptions,
): Compatibility {
  const checks: Check[] = [];
  const sideOf = (server: ServerFacts | undefined): Side | undefined => {
    if (server?.payload === undefined) return undefined;
    const hash = server.payload.compatibilityHash;
    const found = findFactors(server, server.payload, options);
    checks.push(factorCheck(server.role, hash, found));
    return { hash, factors: found?.factors, candidates: candidatesOf(server, options) };
  };
  const [p, d] = [sideOf(prefill), sideOf(decode)];
  if (p !== undefined && d !== undefined) checks.push(pairCheck(p, d));
  return { checks, factors: { prefill: p?.factors, decode: d?.factors } };
}

function candidatesOf(
  server: ServerFacts,
  { knownFactors }: CompatibilityOptions,
): FactorCandidates {
  const { speculative_config, ...others } = knownFactors;
  const models = modelNames(server);
  const { metadata } = server;
  return {
    ...Object.fromEntries(Object.entries(others).map(([name, value]) => [name, [value].flat()])),
    model: [...new Set([...models, ...models.flatMap((name) => [...modelForms(name)])])],
    speculative_config: isRecord(speculative_config)
      ? speculativeForms(speculative_config, String(others["cache_dtype"] ?? "auto"))
      : [],
    ...(metadata && { attn_backend_name: [metadata.attentionBackend] }),
  };
}

const isRecord = (value: unknown): value is Readonly<Record<string, unknown>> =>
  typeof value === "object" && value !== null && !Array.isArray(value);

type Found = HashSearch & { readonly isAnnounced?: true };

function findFactors(
  server: ServerFacts,
  { extension, compatibilityHash: hash }: HandshakePayload,
  { knownFactors, tpOf }: CompatibilityOptions,
): Found | undefined {
  const { metadata, metadataFields = [] } = server;
  const announced = extension?.factors;
  if (isRecord(announced) && compatibilityHash(announced) === hash)
    return { factors: announced, tried: 0, isAnnounced: true };
  if (metadata === undefined) return undefined;
  return findHashFactors(hash, {
    vllmVersion: server.vllmVersion,
    models: modelNames(server),
    metadata,
    versions: versionsWithFields(metadataFields),
    tpSize: tpOf(server),
    cacheDtype: server.cacheSettings?.cache_dtype,
    transferMode: server.remotePrefill?.transferMode,
    knownFactors,
  });
}

const modelNames = ({ model }: ServerFacts) =>
  [model?.root, model?.id].filter((name) => name !== undefined);

function factorCheck(role: Role, hash: string, found: Found | undefined): Check {
  const [id, title] = [`compatibility.${role}`, `hash of ${role}`] as const;
  const shown = `${hash.slice(0, 16)}…`;
  const { factors, tried = 0, isAnnounced } = found ?? {};
  if (factors === undefined)
    return check(
      id,
      title,
      "note",
      `${shown}: its factors are unknown; none of ${tried} combinations has this hash`,
      "give what you know of the server: --model, --dtype, --kv-heads, --head-size, --layers, --kv-cache-dtype, --attention-backend, --speculative-config",
      { hash },
    );
  const values = Object.entries(factors)
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([name, value]) => `${name} ${JSON.stringify(value)}`);
  const source = isAnnounced ? "" : ` (found after ${tried} combinations)`;
  const text = `${shown} is the hash of ${values.join(", ")}${source}`;
  return check(id, title, "ok", text, undefined, { hash, factors, tried });
}

function pairCheck(prefill: Side, decode: Side): Check {
  const [id, title] = ["compatibility.pair", "the two hashes"] as const;
  if (prefill.hash === decode.hash) return check(id, title, "ok", "equal");
  const { differences, text } = explainDifference(prefill, decode);
  const found = `they differ, and the decode server refuses the handshake: ${text}`;
  const details = { prefill: prefill.hash, decode: decode.hash, differences };
  return check(id, title, "fail", found, fixOf(differences), details);
}

interface Explanation {
  readonly differences: readonly FactorDifference[];
  readonly text: string;
}

/** `ours` is D's value, `theirs` P's. */
function explainDifference(prefill: Side, decode: Side): Explanation {
  // A server with unknown factors has its hash searched among similar factors.
  if (decode.factors === undefined) {
    if (prefill.factors === undefined) {
      const text = "the factor that differs is unknown, because neither server's factors are known";
      return { differences: [], text };
    }
    const found = explainCompatibility(prefill.factors, { hash: decode.hash }, decode.candidates);
    const differences = found.differences.map(({ factor, ours: theirs, theirs: ours }) => ({
      factor,
      ours,
      theirs,
    }));
    return { differences, text: differences.length === 0 ? found.text : list(differences) };
  }
  if (prefill.factors === undefined)
    return explainCompatibility(decode.factors, { hash: prefill.hash }, prefill.candidates);
  const differences = compareFactors(decode.factors, prefill.factors);
  return { differences, text: list(differences) };
}

function list(differences: readonly FactorDifference[]): string {
  const shown = (value: unknown) => (value === undefined ? "no factor" : JSON.stringify(value));
  return differences
    .map(
      ({ factor, ours, theirs }) =>
        `${factor} is ${shown(theirs)} at prefill and ${shown(ours)} at decode`,
    )
    .join("; ");
}

const FIXES: Readonly<Record<string, string>> = factorFixes;

function fixOf(differences: readonly FactorDifference[]): string {
  const fixes = differences.map(
    ({ factor }) => FIXES[factor] ?? `make ${factor} equal on both sides`,
  );
  if (fixes.length === 0) fixes.push("compare the two command lines");
  fixes.push(
    'or set "enforce_handshake_compat": false in kv_connector_extra_config of decode, at your own risk',
  );
  return [...new Set(fixes)].join("; ");
}
