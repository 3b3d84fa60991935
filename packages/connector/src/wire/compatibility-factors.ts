import { createHash } from "node:crypto";
import { pythonJson } from "./python-json.js";

/** The factors of vLLM's compatibility hash, under their names there (0.33, connector version 15). */
export interface CompatibilityFactors {
  readonly vllm_version: string;
  readonly nixl_connector_version: number;
  readonly model: string;
  readonly dtype: string;
  readonly num_kv_heads: number;
  readonly head_size: number;
  readonly num_hidden_layers: number;
  readonly attn_backend_name: string;
  readonly cache_dtype: string;
  readonly is_hma_enabled: boolean;
  readonly speculative_config: unknown;
  readonly transfer_mode: "pull" | "push";
}

/** SHA-256, in hex, of Python's `json.dumps(factors, sort_keys=True)` (vLLM 0.33: `hash_factors` of vllm/config/utils.py). */
export function compatibilityHash(factors: CompatibilityFactors | Readonly<Record<string, unknown>>): string {
  return sha256Hex(pythonJson(factors));
}

export function sha256Hex(text: string): string {
  return createHash("sha256").update(text, "utf8").digest("hex");
}

export interface FactorDifference {
  readonly factor: string;
  readonly ours: unknown;
  readonly theirs: unknown;
}

/** What differs between two sets of factors, both values each. */
export function compareFactors(
  ours: Readonly<Record<string, unknown>>,
  theirs: Readonly<Record<string, unknown>>,
): readonly FactorDifference[] {
  const names = [...new Set([...Object.keys(ours), ...Object.keys(theirs)])].sort();
  return names
    .filter((factor) => pythonJson(ours[factor]) !== pythonJson(theirs[factor]))
    .map((factor) => ({ factor, ours: ours[factor], theirs: theirs[factor] }));
}
