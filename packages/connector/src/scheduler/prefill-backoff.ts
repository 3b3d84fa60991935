import { type KvCacheConfig, KvError } from "@kv/interface";
import { cacheKind } from "@kv/plan";

/** Tokens at the end of a prompt that only its decode engine may compute, and why. */
export interface PrefillBackoff {
  readonly tokens: number;
  /** The group and its kind, or the setting, as the subject of messages. */
  readonly because: string;
  /** Group and kind; empty for a setting. */
  readonly details: Readonly<Record<string, unknown>>;
}

/**
 * The tokens that a prefill engine must leave to the decode engine (vLLM 0.33: `_prefill_backoff`); undefined where there are none. A state has room for one
 * position, and the decode engine computes the last token in any case: a state that has it already would get it twice. Errors: `KV_CONFIG_INVALID`.
 */
export function prefillBackoff({
  groups,
  prefillBackoffTokens = 0,
}: KvCacheConfig): PrefillBackoff | undefined {
  if (!Number.isSafeInteger(prefillBackoffTokens) || prefillBackoffTokens < 0) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `prefillBackoffTokens is ${prefillBackoffTokens}, expected 0 or more`,
    );
  }
  const group = groups.findIndex(({ kind }) => cacheKind(kind).extent === "state");
  const kind = groups[group]?.kind;
  if (kind !== undefined) {
    const because = `group ${group} of the KV cache is "${kind}", a state after the last token`;
    return { tokens: Math.max(1, prefillBackoffTokens), because, details: { group, kind } };
  }
  if (prefillBackoffTokens === 0) return undefined;
  const because = `prefillBackoffTokens of the KV cache is ${prefillBackoffTokens}`;
  return { tokens: prefillBackoffTokens, because, details: { prefillBackoffTokens } };
}

/** The error of a prefill for a decode engine, to which the last tokens must be left. */
export function wholePromptsError(backoff: PrefillBackoff): KvError {
  return new KvError(
    "KV_PLAN_UNSUPPORTED",
    `${backoff.because}: a prefill engine must leave the last ${backoff.tokens} tokens of a prompt to the decode engine, and this connector's computes all of them`,
    {
      hint: "prefill this model with vLLM 0.33, which leaves them out, or serve it without KV transfer",
      details: { ...backoff.details, tokens: backoff.tokens },
    },
  );
}

/**
 * Refuses the KV of a prefill engine that has computed the tokens which this one will compute. Errors: `KV_PLAN_UNSUPPORTED` with both numbers, also for an
 * engine that has not announced a number.
 */
export function requireLastTokensLeft(
  backoff: PrefillBackoff,
  {
    numTokens,
    numPromptTokens,
  }: { readonly numTokens: number | undefined; readonly numPromptTokens: number },
): void {
  const wanted = numPromptTokens - backoff.tokens;
  // A shorter prompt is computed here, all of it.
  if (wanted <= 0 || (numTokens ?? Number.POSITIVE_INFINITY) <= wanted) return;
  throw new KvError(
    "KV_PLAN_UNSUPPORTED",
    `${backoff.because}: a prefill engine must leave the last ${backoff.tokens} of ${numPromptTokens} prompt tokens to this one, and it ` +
      `${numTokens === undefined ? "does not say how many it computes" : `has computed ${numTokens}`} (remote_num_tokens)`,
    {
      hint: "prefill this model with vLLM 0.33, which leaves them out, or serve it without KV transfer",
      details: { ...backoff.details, remoteNumTokens: numTokens ?? null, numPromptTokens },
    },
  );
}
