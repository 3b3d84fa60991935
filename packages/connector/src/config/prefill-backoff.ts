import { type ConnectorRequest, type KvCacheConfig, KvError } from "@kv/interface";
import { cacheKind } from "@kv/plan";

/** Tokens at the end of a prompt that only its decode engine may compute, and why. */
export interface PrefillBackoff {
  readonly tokens: number;
  /** The group and its kind, or the setting, as the subject of messages. */
  readonly because: string;
  readonly details: Readonly<Record<string, unknown>>;
}

/**
 * The tokens that a prefill engine must leave to the decode engine (vLLM 0.33: `_prefill_backoff`);
 * undefined where there are none. A state has room for one position, and the decode engine computes
 * the last token in any case: a state that has it already would get it twice.
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
 * P's half: the prompts of which an engine leaves out the last tokens (vLLM 0.33:
 * `_truncate_request_for_prefill`). A prompt that is no longer than those is computed whole: no D
 * takes its KV.
 */
export class ShortenedPrompts {
  readonly #backoff: PrefillBackoff;
  readonly #tokens = new Map<string, number>();

  constructor(backoff: PrefillBackoff) {
    this.#backoff = backoff;
  }

  /**
   * As `SchedulerConnector.tokensToPrefill`, of a request that is prefilled for a decode engine.
   */
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
 * D's half: refuses the KV of a prefill engine that has computed the tokens which this one will
 * compute. One that has not answered yet (push) leaves them out, as vLLM's does, or refuses D's
 * number of tokens.
 * @throws `KV_PLAN_UNSUPPORTED` with both numbers, also for an engine that has answered without a
 * number.
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
  // A shorter prompt is computed here, all of it.
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
