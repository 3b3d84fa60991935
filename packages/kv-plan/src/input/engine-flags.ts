import { KV_CACHE_LAYOUTS, type KvCacheLayout, KvError } from "@kv/interface";

/**
 * Both engines' settings. A list is empty (the default), one value for both, or prefill's and
 * decode's.
 */
export interface EngineFlags {
  readonly tp: readonly number[];
  readonly pp: readonly number[];
  readonly blockSize: readonly number[];
  readonly kernelBlockSize: readonly number[];
  readonly layout: readonly KvCacheLayout[];
  readonly backend: readonly string[];
  readonly numBlocks: readonly number[];
}

/** Older names of two layouts in vLLM's flag. */
const LAYOUT_NAMES: ReadonlyMap<string, KvCacheLayout> = new Map([
  ["HND", "LBHNC"],
  ["NHD", "LBNHC"],
]);

export function layoutOf(name: string): KvCacheLayout | undefined {
  return LAYOUT_NAMES.get(name) ?? KV_CACHE_LAYOUTS.find((known) => known === name);
}

/**
 * The values of prefill and decode.
 * @throws `KV_CONFIG_INVALID` when more than two are given.
 */
export function both<T>(flag: string, values: readonly T[], fallback: T): readonly [T, T] {
  if (values.length > 2) {
    throw new KvError("KV_CONFIG_INVALID", `${flag} is given ${values.length} times`, {
      hint: "once for both engines, or twice: for prefill, then for decode",
    });
  }
  const [prefill = fallback, decode = prefill] = values;
  return [prefill, decode];
}
