import {
  compareFactors,
  compatibilityHash,
  explainCompatibility,
  type FactorCandidates,
  type FactorDifference,
  type Factors,
  findHashFactors,
  type HashSearch,
  modelForms,
  speculativeForms,
} from "@kv/protocol";
import { type Check, check, type Role } from "../checks/report.js";
import type { ServerFacts } from "./server-facts.js";
import { versionsWithFields } from "./wire-version.js";

export interface CompatibilityOptions {
  readonly knownFactors: Readonly<Record<string, unknown>>;
  readonly tpOf: (server: ServerFacts) => number;
}

export interface Compatibility {
  readonly checks: readonly Check[];
  readonly factors: Readonly<Record<Role, Factors>>;
}

/**
 * Compares the two compatibility hashes and finds the factor that differs; only digests cross the
 * wire.
 */
export function compatibilityChecks(
  prefill: ServerFacts,
  decode: ServerFacts | undefined,
  options: CompatibilityOptions,
): Compatibility {
  const checks: Check[] = [];
  const factorsOf = (server: ServerFacts | undefined): Factors => {
    if (server?.payload === undefined) return undefined;
    const found = findFactors(server, options);
    checks.push(factorCheck(server.role, server.payload.compatibilityHash, found));
    return found?.factors;
  };
  const factors = { prefill: factorsOf(prefill), decode: factorsOf(decode) };
  const hashes = {
    prefill: prefill.payload?.compatibilityHash,
    decode: decode?.payload?.compatibilityHash,
  };
  if (decode !== undefined && hashes.prefill !== undefined && hashes.decode !== undefined)
    checks.push(
      pairCheck({ prefill: hashes.prefill, decode: hashes.decode }, factors, {
        prefill: candidatesOf(prefill, options),
        decode: candidatesOf(decode, options),
      }),
    );
  return { checks, factors };
}

function candidatesOf(
  server: ServerFacts,
  { knownFactors }: CompatibilityOptions,
): FactorCandidates {
  const { speculative_config, ...others } = knownFactors;
  const models = modelNames(server);
  const known = Object.entries(others).map(([name, value]) => [name, [value].flat()] as const);
  const given = isRecord(speculative_config)
    ? speculativeForms(speculative_config, String(others["cache_dtype"] ?? "auto"))
    : [];
  return {
    ...Object.fromEntries(known),
    model: [...new Set([...models, ...models.flatMap((name) => [...modelForms(name)])])],
    speculative_config: given,
    ...(server.metadata === undefined
      ? {}
      : { attn_backend_name: [server.metadata.attentionBackend] }),
  };
}

const isRecord = (value: unknown): value is Readonly<Record<string, unknown>> =>
  typeof value === "object" && value !== null && !Array.isArray(value);

/** `announced`: the server sent its factors, as an engine of this project does. */
type Found = HashSearch & { readonly isAnnounced?: true };

function findFactors(
  server: ServerFacts,
  { knownFactors, tpOf }: CompatibilityOptions,
): Found | undefined {
  const { payload, metadata, metadataFields = [] } = server;
  if (payload === undefined) return undefined;
  const announced = payload.extension?.factors;
  if (isRecord(announced) && compatibilityHash(announced) === payload.compatibilityHash)
    return { factors: announced, tried: 0, isAnnounced: true };
  if (metadata === undefined) return undefined;
  return findHashFactors(payload.compatibilityHash, {
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
  const of = (status: "ok" | "note", text: string, more: Pick<Check, "fix" | "details">) =>
    check(`compatibility.${role}`, `hash of ${role}`, status, `${hash.slice(0, 16)}…${text}`, more);
  const { factors, tried = 0, isAnnounced } = found ?? {};
  if (factors === undefined)
    return of("note", `: its factors are unknown; none of ${tried} combinations has this hash`, {
      fix: "give what you know of the server: --model, --dtype, --kv-heads, --head-size, --layers, --kv-cache-dtype, --attention-backend, --speculative-config",
      details: { hash },
    });
  const values = Object.entries(factors)
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([name, value]) => `${name} ${JSON.stringify(value)}`);
  const source = isAnnounced ? "" : ` (found after ${tried} combinations)`;
  return of("ok", ` is the hash of ${values.join(", ")}${source}`, {
    details: { hash, factors, tried },
  });
}

function pairCheck(
  hashes: Readonly<Record<Role, string>>,
  factors: Readonly<Record<Role, Factors>>,
  candidates: Readonly<Record<Role, FactorCandidates>>,
): Check {
  const title = "the two hashes";
  if (hashes.prefill === hashes.decode) return check("compatibility.pair", title, "ok", "equal");
  const { differences, text } = explainDifference(hashes, factors, candidates);
  return check(
    "compatibility.pair",
    title,
    "fail",
    `they differ, and the decode server refuses the handshake: ${text}`,
    { fix: fixOf(differences), details: { ...hashes, differences } },
  );
}

/** In the differences, `ours` is the decode server's value and `theirs` the prefill server's. */
function explainDifference(
  hashes: Readonly<Record<Role, string>>,
  { prefill, decode }: Readonly<Record<Role, Factors>>,
  candidates: Readonly<Record<Role, FactorCandidates>>,
): { readonly differences: readonly FactorDifference[]; readonly text: string } {
  if (prefill !== undefined && decode !== undefined) {
    const differences = compareFactors(decode, prefill);
    return { differences, text: list(differences) };
  }
  // When only one server's factors are known, the other hash is searched among similar factors.
  if (decode !== undefined)
    return explainCompatibility(decode, { hash: hashes.prefill }, candidates.prefill);
  if (prefill !== undefined) {
    const found = explainCompatibility(prefill, { hash: hashes.decode }, candidates.decode);
    const differences = found.differences.map(({ factor, ours: theirs, theirs: ours }) => ({
      factor,
      ours,
      theirs,
    }));
    return { differences, text: differences.length === 0 ? found.text : list(differences) };
  }
  return {
    differences: [],
    text: "the factor that differs is unknown, because neither server's factors are known",
  };
}

function list(differences: readonly FactorDifference[]): string {
  return differences
    .map(
      ({ factor, ours, theirs }) =>
        `${factor} is ${factorText(theirs)} at prefill and ${factorText(ours)} at decode`,
    )
    .join("; ");
}

const factorText = (value: unknown) => (value === undefined ? "no factor" : JSON.stringify(value));

const FIXES: Readonly<Record<string, string>> = {
  vllm_version: "run one version of vLLM on both sides",
  nixl_connector_version: "run one version of vLLM on both sides",
  cross_layers_blocks: "run one version of vLLM on both sides",
  revision:
    "start both servers with one --revision: they have loaded different weights, and D would go on from KV of others",
  code_revision: "start both servers with one --code-revision",
  model:
    "start both servers with the same --model string: the hash contains the string, not the weights",
  dtype: "give both the same --dtype",
  attn_backend_name: "give both the same attention backend (--attention-backend)",
  cache_dtype: "give both the same --kv-cache-dtype",
  is_hma_enabled: "set --disable-hybrid-kv-cache-manager on both or on neither",
  speculative_config: "give both the same --speculative-config",
  transfer_mode: "use NixlConnector (pull) or NixlPushConnector on both",
};

function fixOf(differences: readonly FactorDifference[]): string {
  const fixes = [
    ...new Set(
      differences.map(({ factor }) => FIXES[factor] ?? `make ${factor} equal on both sides`),
    ),
  ];
  const last =
    'or set "enforce_handshake_compat": false in kv_connector_extra_config of decode, at your own risk';
  return [...(fixes.length === 0 ? ["compare the two command lines"] : fixes), last].join("; ");
}
