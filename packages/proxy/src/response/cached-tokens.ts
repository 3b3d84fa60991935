import type { ValueEdit } from "./answer-members.js";
import type { Usage } from "./sum-usage.js";

/** The tokens of the prompt that P had cached; undefined where P did not say so. */
export type CachedTokens = () => Promise<number | undefined>;

type Fields = Record<string, unknown>;

/**
 * A usage with P's cached tokens. In push, D counts all that it got from P as cached: vLLM tells it
 * P's number with the KV parameters of pull alone. Where P's number is not known, there is none.
 */
export function withCachedTokens(usage: Usage, cached: number | undefined): Usage {
  const changed = { ...usage };
  if (isObject(usage.prompt_tokens_details))
    changed.prompt_tokens_details = {
      ...usage.prompt_tokens_details,
      cached_tokens: cached ?? null,
    };
  // Its clients want a number.
  if (isObject(usage.input_tokens_details))
    changed.input_tokens_details = { ...usage.input_tokens_details, cached_tokens: cached ?? 0 };
  const { cache_read_input_tokens: read, input_tokens: input } = usage;
  if (typeof read === "number" && typeof input === "number") {
    // In the Messages API, the input tokens are those that were not cached.
    changed.cache_read_input_tokens = cached ?? 0;
    changed.input_tokens = Math.max(0, input + read - (cached ?? 0));
  }
  return changed;
}

function isObject(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * Puts P's cached tokens into the JSON text of a usage. Asks for them only where the usage has
 * some.
 */
export function cachedTokensEdit(cachedTokens: CachedTokens): ValueEdit {
  return (text) => {
    if (!MARKS.some((mark) => text.includes(mark))) return text;
    let usage: unknown;
    try {
      usage = JSON.parse(text);
    } catch {
      // The client's parser refuses it.
      return text;
    }
    if (!isObject(usage)) return text;
    return cachedTokens().then((cached) => JSON.stringify(withCachedTokens(usage, cached)));
  };
}

/** Members that only a usage with cached tokens has. */
const MARKS = ["_tokens_details", "cache_read_input_tokens"];
