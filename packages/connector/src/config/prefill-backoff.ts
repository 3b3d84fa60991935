import { type ConnectorRequest, type KvCacheConfig, KvError } from "@kv/interface";
import { cacheKind } from "@kv/plan";

/** Tokens at the end of a prompt that only its decode engine may compute, and why. */
export interface PrefillBackoff {
  readonly tokens: number;
  readonly because: string;
  readonly details: Readonly<Record<string, unknown>>;
}

/**
 * The tokens that P leaves to D (vLLM 0.33: `_prefill_backoff`); undefined for none. A state has
 * room for one position, and D computes the last token in any case.
 * @throws `KV_CONFIG_INVALID`.
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

/**
 * P's half: P leaves out the last tokens of prompts that are long enough (vLLM 0.33:
 * `_truncate_request_for_prefill`).
 */
export class ShortenedPrompts {
  readonly #backoff: PrefillBackoff;
  readonly #tokens = new Map<string, number>();

  constructor(backoff: PrefillBackoff) {
    this.#backoff = backoff;
  }

  tokensOf({ requestId, numPromptTokens }: ConnectorRequest): number {
    const { tokens } = this.#backoff;
    const left = numPromptTokens > tokens ? numPromptTokens - tokens : numPromptTokens;
    this.#tokens.set(requestId, left);
    return left;
  }

  /** @throws `KV_PLAN_UNSUPPORTED` for a prompt that the engine has not shortened. */
  require({ requestId, numPromptTokens }: ConnectorRequest): void {
    const told = this.#tokens.get(requestId);
    if (told === numPromptTokens) return;
    const { because, details, tokens } = this.#backoff;
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${because}: a prefill engine must leave the last ${tokens} tokens of a prompt to the decode engine, and this one computes ${
        told === undefined ? "all of them" : `${numPromptTokens}, not ${told}`
      }`,
      {
        hint: "call tokensToPrefill of the connector first, and compute no more tokens of the prompt than it returns",
        details: { ...details, tokens },
      },
    );
  }

  forget(requestId: string): void {
    this.#tokens.delete(requestId);
  }
}

/**
 * D's half: refuses KV of a P that has computed the tokens which D will compute, or does not say.
 * @throws `KV_PLAN_UNSUPPORTED` with both numbers.
 */
export function requireLastTokensLeft(
  backoff: PrefillBackoff,
  {
    numTokens,
    numPromptTokens,
    hasAnswered,
  }: {
    readonly numTokens: number | undefined;
    readonly numPromptTokens: number;
    readonly hasAnswered: boolean;
  },
): void {
  const wanted = numPromptTokens - backoff.tokens;
  if (numTokens === undefined && !hasAnswered) return;
  if (wanted <= 0 || (numTokens ?? Number.POSITIVE_INFINITY) <= wanted) return;
  throw new KvError(
    "KV_PLAN_UNSUPPORTED",
    `${backoff.because}: a prefill engine must leave the last ${backoff.tokens} of ${numPromptTokens} prompt tokens to this one, and it ` +
      `${numTokens === undefined ? "does not say how many it computes" : `has computed ${numTokens}`} (remote_num_tokens)`,
    {
      hint: "prefill this model with vLLM 0.33 or with an engine that calls tokensToPrefill: both leave them out",
      details: { ...backoff.details, remoteNumTokens: numTokens ?? null, numPromptTokens },
    },
  );
}
