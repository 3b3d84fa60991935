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
import type { Check, Role } from "./pair-report.js";
import type { ServerFacts } from "./server-facts.js";
import { versionsWithFields } from "./wire-version.js";

export interface CompatibilityOptions {
  /** Factors that the user gave, by vLLM's names. */
  readonly knownFactors: Readonly<Record<string, unknown>>;
  readonly tpOf: (server: ServerFacts) => number;
}

export interface CompatibilityFindings {
  readonly checks: readonly Check[];
  /** The factors of each server's hash; undefined where they were not found. */
  readonly factors: { readonly prefill: Factors; readonly decode: Factors };
}

/**
 * Compares the two compatibility hashes and finds the factor that differs; only digests cross the
 * wire.
 */
export function compatibilityChecks(
  prefill: ServerFacts,
  decode: ServerFacts | undefined,
  options: CompatibilityOptions,
): CompatibilityFindings {
  const checks: Check[] = [];
  const prefillFactors = factorsOf(prefill, options);
  if (prefill.payload !== undefined) checks.push(factorCheck(prefill, prefillFactors));
  if (decode === undefined)
    return { checks, factors: { prefill: prefillFactors?.factors, decode: undefined } };
  const decodeFactors = factorsOf(decode, options);
  if (decode.payload !== undefined) checks.push(factorCheck(decode, decodeFactors));
  if (prefill.payload !== undefined && decode.payload !== undefined) {
    const hashes = {
      prefill: prefill.payload.compatibilityHash,
      decode: decode.payload.compatibilityHash,
    };
    checks.push(
      pairCheck(hashes, prefillFactors?.factors, decodeFactors?.factors, {
        prefill: candidatesOf(prefill, options),
        decode: candidatesOf(decode, options),
      }),
    );
  }
  return { checks, factors: { prefill: prefillFactors?.factors, decode: decodeFactors?.factors } };
}

/** What is known of a server beside its hash: values to try for its factors. */
function candidatesOf(
  server: ServerFacts,
  { knownFactors }: CompatibilityOptions,
): FactorCandidates {
  const { speculative_config, ...others } = knownFactors;
  const models = [server.model?.root, server.model?.id].filter((name) => name !== undefined);
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

/**
 * `announced`: the server sent its factors (an engine of this project). `search`: they were found
 * by trying.
 */
type Found = HashSearch & { readonly source: "announced" | "search" };

function factorsOf(
  server: ServerFacts,
  { knownFactors, tpOf }: CompatibilityOptions,
): Found | undefined {
  const { payload, metadata, metadataFields = [] } = server;
  if (payload === undefined) return undefined;
  const announced = payload.extension?.factors;
  if (typeof announced === "object" && announced !== null && !Array.isArray(announced)) {
    const factors = announced as Readonly<Record<string, unknown>>;
    if (compatibilityHash(factors) === payload.compatibilityHash)
      return { factors, tried: 0, source: "announced" };
  }
  if (metadata === undefined) return undefined;
  const models = [server.model?.root, server.model?.id].filter((name) => name !== undefined);
  const search = findHashFactors(payload.compatibilityHash, {
    vllmVersion: server.vllmVersion,
    models,
    metadata,
    versions: versionsWithFields(metadataFields),
    tpSize: tpOf(server),
    cacheDtype: server.cacheSettings?.cache_dtype,
    transferMode: server.remotePrefill?.transferMode,
    knownFactors,
  });
  return { ...search, source: "search" };
}

function factorCheck({ role, payload }: ServerFacts, found: Found | undefined): Check {
  const hash = payload?.compatibilityHash ?? "";
  const about = {
    id: `compatibility.${role}`,
    area: "compatibility" as const,
    title: `hash of ${role}`,
  };
  if (found?.factors === undefined) {
    return {
      ...about,
      status: "note",
      found: `${hash.slice(0, 16)}…: its factors are unknown; none of ${found?.tried ?? 0} combinations has this hash`,
      fix: "give what you know of the server: --model, --dtype, --kv-heads, --head-size, --layers, --kv-cache-dtype, --attention-backend, --speculative-config",
      details: { hash },
    };
  }
  const values = Object.entries(found.factors)
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([name, value]) => `${name} ${JSON.stringify(value)}`);
  const source = found.source === "announced" ? "" : ` (found after ${found.tried} combinations)`;
  return {
    ...about,
    status: "ok",
    found: `${hash.slice(0, 16)}… is the hash of ${values.join(", ")}${source}`,
    details: { hash, factors: found.factors, tried: found.tried },
  };
}

function pairCheck(
  hashes: { readonly prefill: string; readonly decode: string },
  prefill: Factors,
  decode: Factors,
  candidates: Readonly<Record<Role, FactorCandidates>>,
): Check {
  const about = {
    id: "compatibility.pair",
    area: "compatibility" as const,
    title: "the two hashes",
  };
  if (hashes.prefill === hashes.decode) return { ...about, status: "ok", found: "equal" };
  const { differences, text } = explainDifference(hashes, prefill, decode, candidates);
  return {
    ...about,
    status: "fail",
    found: `they differ, and the decode server refuses the handshake: ${text}`,
    fix: fixOf(differences),
    details: { ...hashes, differences },
  };
}

/** In the differences, `ours` is the decode server's value and `theirs` the prefill server's. */
function explainDifference(
  hashes: { readonly prefill: string; readonly decode: string },
  prefill: Factors,
  decode: Factors,
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
    const { differences, text } = explainCompatibility(
      prefill,
      { hash: hashes.decode },
      candidates.decode,
    );
    const swapped = differences.map(({ factor, ours, theirs }) => ({
      factor,
      ours: theirs,
      theirs: ours,
    }));
    return { differences: swapped, text: swapped.length === 0 ? text : list(swapped) };
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
