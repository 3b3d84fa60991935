import { createHash } from "node:crypto";
import { pythonJson } from "./python-json.js";

/**
 * Factors of vLLM's compatibility hash, by vLLM's names (0.33, connector version 15). A pair needs
 * equal values.
 */
export interface CompatibilityFactors {
  readonly vllm_version: string;
  /** `NIXL_CONNECTOR_VERSION`: 14 in 0.32, 15 in 0.33. */
  readonly nixl_connector_version: number;
  readonly model: string;
  /** PyTorch's name, such as "torch.bfloat16". */
  readonly dtype: string;
  /** Heads of the whole model. */
  readonly num_kv_heads: number;
  readonly head_size: number;
  readonly num_hidden_layers: number;
  readonly attn_backend_name: string;
  readonly cache_dtype: string;
  readonly is_hma_enabled: boolean;
  /** JSON; null without speculative decoding. */
  readonly speculative_config: unknown;
  readonly transfer_mode: "pull" | "push";
}

/**
 * Returns the SHA-256, in lower-case hex, of Python's `json.dumps(factors, sort_keys=True)` (vLLM
 * 0.33: `hash_factors`, vllm/config/utils.py).
 */
export function compatibilityHash(
  factors: CompatibilityFactors | Readonly<Record<string, unknown>>,
): string {
  return sha256Hex(pythonJson(factors));
}

function sha256Hex(text: string): string {
  return createHash("sha256").update(text, "utf8").digest("hex");
}

/** A factor that differs between the sides. */
export interface FactorDifference {
  readonly factor: string;
  /** Undefined where this side lacks it. */
  readonly ours: unknown;
  /** Undefined where the peer lacks it. */
  readonly theirs: unknown;
}

/** Returns the factors that differ, in alphabetical order, compared as Python writes them. */
export function compareFactors(
  ours: Readonly<Record<string, unknown>>,
  theirs: Readonly<Record<string, unknown>>,
): readonly FactorDifference[] {
  const names = [...new Set([...Object.keys(ours), ...Object.keys(theirs)])].sort();
  return names
    .filter(
      (factor) =>
        Object.hasOwn(ours, factor) !== Object.hasOwn(theirs, factor) ||
        pythonJson(ours[factor]) !== pythonJson(theirs[factor]),
    )
    .map((factor) => ({ factor, ours: ours[factor], theirs: theirs[factor] }));
}

/** Caches the JSON of values, which repeat over thousands of combinations. */
export function digester(): (factors: Readonly<Record<string, unknown>>) => string {
  const texts = new Map<string, Map<unknown, string>>();
  return (factors) => {
    const entries = Object.keys(factors)
      .sort()
      .map((name) => {
        const ofName = texts.get(name) ?? new Map<unknown, string>();
        texts.set(name, ofName);
        const value = factors[name];
        const text = ofName.get(value) ?? pythonJson({ [name]: value }).slice(1, -1);
        ofName.set(value, text);
        return text;
      });
    return sha256Hex(`{${entries.join(", ")}}`);
  };
}
