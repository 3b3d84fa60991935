import { createHash } from "node:crypto";
import { pythonJson } from "./python-json.js";

/**
 * The factors of vLLM's compatibility hash, under vLLM's names (0.33, connector version 15). Both
 * sides of a pair must have equal values.
 */
export interface CompatibilityFactors {
  /** vLLM's version, such as "0.33.0". */
  readonly vllm_version: string;
  /** vLLM's `NIXL_CONNECTOR_VERSION`: 14 in 0.32, 15 in 0.33. */
  readonly nixl_connector_version: number;
  /** The model's name or path, exactly as the engine was started with it. */
  readonly model: string;
  /** The model's dtype as PyTorch writes it, such as "torch.bfloat16". */
  readonly dtype: string;
  /** KV heads of the whole model, not of one rank. */
  readonly num_kv_heads: number;
  /** Elements per head. */
  readonly head_size: number;
  /** Layers of the whole model. */
  readonly num_hidden_layers: number;
  readonly attn_backend_name: string;
  /** `cache_dtype` of vLLM's cache config, such as "auto" or "fp8". */
  readonly cache_dtype: string;
  /** Whether vLLM's hybrid memory allocator is on. */
  readonly is_hma_enabled: boolean;
  /** vLLM's speculative config as JSON; null without speculative decoding. */
  readonly speculative_config: unknown;
  /** Whether D reads ("pull") or P writes ("push"). */
  readonly transfer_mode: "pull" | "push";
}

/**
 * Lower-case hex of the SHA-256 of Python's `json.dumps(factors, sort_keys=True)` (vLLM 0.33:
 * `hash_factors`, vllm/config/utils.py).
 */
export function compatibilityHash(
  factors: CompatibilityFactors | Readonly<Record<string, unknown>>,
): string {
  return sha256Hex(pythonJson(factors));
}

/** Lower-case hex of the SHA-256 of the text's UTF-8. */
export function sha256Hex(text: string): string {
  return createHash("sha256").update(text, "utf8").digest("hex");
}

/** A factor with different values on both sides. */
export interface FactorDifference {
  /** The factor's name, as in `CompatibilityFactors`. */
  readonly factor: string;
  /** The value on this side; undefined where this side has no such factor. */
  readonly ours: unknown;
  /** The peer's value; undefined where the peer has no such factor. */
  readonly theirs: unknown;
}

/**
 * The factors that differ between two sets, in alphabetical order. Values are compared as Python
 * writes them.
 */
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
