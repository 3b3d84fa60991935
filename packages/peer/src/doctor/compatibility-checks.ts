import { compareFactors, compatibilityHash, explainCompatibility, type FactorDifference } from "@kv/protocol";
import type { Check } from "../report/check.js";
import { type ReproducedHash, reproduceHash } from "./reproduce-hash.js";
import type { Side } from "./side.js";

export interface CompatibilityOptions {
  /** Factors that the user knows, by vLLM's names. */
  readonly given: Readonly<Record<string, unknown>>;
  readonly tpOf: (side: Side) => number;
}

export interface CompatibilityFindings {
  readonly checks: readonly Check[];
  /** Of the prefill side, where they are known. */
  readonly factors: Readonly<Record<string, unknown>> | undefined;
}

/** Compares the hashes, and says which factor of them differs: only digests cross the wire. */
export function compatibilityChecks(
  prefill: Side,
  decode: Side | undefined,
  options: CompatibilityOptions,
): CompatibilityFindings {
  const checks: Check[] = [];
  const theirs = known(prefill, options);
  if (prefill.payload !== undefined) checks.push(factorCheck(prefill, theirs));
  if (decode === undefined) return { checks, factors: theirs?.factors };
  const ours = known(decode, options);
  if (decode.payload !== undefined) checks.push(factorCheck(decode, ours));
  if (prefill.payload !== undefined && decode.payload !== undefined) {
    checks.push(pairCheck(prefill.payload.compatibilityHash, decode.payload.compatibilityHash, theirs, ours));
  }
  return { checks, factors: theirs?.factors ?? ours?.factors };
}

type Known = ReproducedHash & { readonly how: "told" | "found" };

function known(side: Side, { given, tpOf }: CompatibilityOptions): Known | undefined {
  const { payload, metadata } = side;
  if (payload === undefined) return undefined;
  const told = payload.extension?.factors;
  if (typeof told === "object" && told !== null && !Array.isArray(told)) {
    const factors = told as Readonly<Record<string, unknown>>;
    if (compatibilityHash(factors) === payload.compatibilityHash) return { factors, tried: 0, how: "told" };
  }
  if (metadata === undefined) return undefined;
  const models = [side.model?.root, side.model?.id].filter((name) => name !== undefined);
  const found = reproduceHash(payload.compatibilityHash, {
    vllmVersion: side.vllmVersion,
    models,
    metadata,
    tpSize: tpOf(side),
    cacheDtype: side.cacheSettings?.cache_dtype,
    transferMode: side.told?.transferMode,
    given,
  });
  return { ...found, how: "found" };
}

function factorCheck(side: Side, found: Known | undefined): Check {
  const hash = side.payload?.compatibilityHash ?? "";
  const about = {
    id: `compatibility.${side.role}`,
    area: "compatibility" as const,
    title: `hash of ${side.role}`,
  };
  if (found?.factors === undefined) {
    return {
      ...about,
      status: "note",
      found: `${hash.slice(0, 16)}…: none of ${found?.tried ?? 0} sets of factors gives it, so what it is made of is not known`,
      fix: "give what you know of the model: --model, --dtype, --kv-heads, --head-size, --layers",
      details: { hash },
    };
  }
  const values = Object.entries(found.factors)
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([name, value]) => `${name} ${JSON.stringify(value)}`);
  return {
    ...about,
    status: "ok",
    found: `${hash.slice(0, 16)}… is of ${values.join(", ")}${found.how === "told" ? "" : ` (found, ${found.tried} sets tried)`}`,
    details: { hash, factors: found.factors, tried: found.tried },
  };
}

function pairCheck(p: string, d: string, theirs: Known | undefined, ours: Known | undefined): Check {
  const about = { id: "compatibility.pair", area: "compatibility" as const, title: "the two hashes" };
  if (p === d) return { ...about, status: "ok", found: "equal" };
  const { differences, text } = explained(p, d, theirs, ours);
  return {
    ...about,
    status: "fail",
    found: `different, and the decode side refuses the handshake: ${text}`,
    fix: fixOf(differences),
    details: { prefill: p, decode: d, differences },
  };
}

function explained(p: string, d: string, theirs: Known | undefined, ours: Known | undefined) {
  if (theirs?.factors !== undefined && ours?.factors !== undefined) {
    const differences = compareFactors(ours.factors, theirs.factors);
    return { differences, text: list(differences) };
  }
  // One side is known: the other is searched for near it.
  if (ours?.factors !== undefined) return explainCompatibility(ours.factors, { hash: p });
  if (theirs?.factors !== undefined) {
    const { differences, text } = explainCompatibility(theirs.factors, { hash: d });
    const turned = differences.map(({ factor, ours: here, theirs: there }) => ({
      factor,
      ours: there,
      theirs: here,
    }));
    return { differences: turned, text: turned.length === 0 ? text : list(turned) };
  }
  return { differences: [], text: "which factor differs cannot be told, as neither side's are known" };
}

function list(differences: readonly FactorDifference[]): string {
  return differences
    .map(
      ({ factor, ours, theirs }) =>
        `${factor} is ${JSON.stringify(theirs)} at prefill and ${JSON.stringify(ours)} at decode`,
    )
    .join("; ");
}

const FIXES: Readonly<Record<string, string>> = {
  vllm_version: "run one version of vLLM on both sides",
  nixl_connector_version: "run one version of vLLM on both sides",
  model:
    "name the model to both servers by the very same string (--model): the string is hashed, not the weights",
  dtype: "give both the same --dtype",
  attn_backend_name: "give both the same attention backend (--attention-backend)",
  cache_dtype: "give both the same --kv-cache-dtype",
  is_hma_enabled: "set --disable-hybrid-kv-cache-manager on both or on neither",
  speculative_config: "give both the same --speculative-config",
  transfer_mode: "use NixlConnector (pull) or NixlPushConnector on both",
};

function fixOf(differences: readonly FactorDifference[]): string {
  const fixes = [
    ...new Set(differences.map(({ factor }) => FIXES[factor] ?? `make ${factor} equal on both sides`)),
  ];
  const last =
    'or "enforce_handshake_compat": false in kv_connector_extra_config of decode, at your own risk';
  return [...(fixes.length === 0 ? ["compare the two command lines"] : fixes), last].join("; ");
}
