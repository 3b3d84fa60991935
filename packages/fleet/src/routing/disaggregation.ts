/** What is known about a request before its first leg. */
export interface DisaggregationInputs {
  /** Tokens of the prompt, exact or estimated; undefined where nothing is known. */
  readonly promptTokens: number | undefined;
  /**
   * Tokens of the prompt, from its first, that the decode instance has in its prefix cache; 0 where
   * it is not known.
   */
  readonly decodeCachedTokens: number;
  /**
   * Tokens of the prompt, from its first, that a prefill instance has in its prefix cache; 0 where
   * it is not known.
   */
  readonly prefillCachedTokens: number;
  /**
   * Tokens of the prompt, from its first, that a prefill instance can read from a decode instance;
   * 0 where there are none.
   */
  readonly readbackTokens: number;
  /**
   * How long a prefill instance would read and compute, in milliseconds; undefined where it is not
   * known.
   */
  readonly prefillComputeMs: number | undefined;
  /**
   * How long the prompt would wait for a prefill instance, in milliseconds; undefined where it is
   * not known.
   */
  readonly prefillWaitMs: number | undefined;
  /**
   * How long the decode instance would compute the rest of the prompt, in milliseconds; undefined
   * where it is not known.
   */
  readonly decodeComputeMs: number | undefined;
  /** Requests in flight at the decode instance: each of them waits while it computes a prompt. */
  readonly decodeInFlight: number;
  /**
   * Share of its time that the decode instance would spend on prompts which it computes itself,
   * this one and those just before; 0 where it is not known.
   */
  readonly decodePromptShare: number;
}

/**
 * Why a request has two legs, or one. Two: `long-suffix`, `readback` (a prefill instance reads the
 * begin of the prompt from a decode instance), `prefill-cached` (a prefill instance has more of the
 * prompt than the decode instance), `unknown-length`, `decode-busy` (few tokens, but the decode
 * instance computes other prompts, and its answers come late). One, at a decode instance:
 * `short-suffix` (few tokens to compute), `prefix-cached` (nearly the whole prompt is cached
 * there), `prefill-busy` (waiting for a prefill instance would take longer than computing delays
 * this request and those in flight at the decode instance).
 */
export type DisaggregationReason =
  | "long-suffix"
  | "readback"
  | "prefill-cached"
  | "unknown-length"
  | "decode-busy"
  | "short-suffix"
  | "prefix-cached"
  | "prefill-busy";

/** Of a prompt, the share that is nearly the whole. */
const NEARLY_ALL = 0.95;
/**
 * The largest share of its time that a decode instance with requests in flight computes prompts:
 * its tokens come later by about as much.
 */
const MOST_PROMPT_SHARE = 0.2;

/**
 * Whether a prefill instance is to compute the prompt. `aboveTokens`: from how many uncached tokens
 * on two legs pay.
 */
export function decideDisaggregation(
  {
    promptTokens,
    decodeCachedTokens,
    prefillCachedTokens,
    readbackTokens,
    prefillComputeMs,
    prefillWaitMs,
    decodeComputeMs,
    decodeInFlight,
    decodePromptShare,
  }: DisaggregationInputs,
  aboveTokens: number,
): { readonly twoLegs: boolean; readonly reason: DisaggregationReason } {
  if (promptTokens === undefined) return { twoLegs: true, reason: "unknown-length" };
  const uncachedTokens = Math.max(0, promptTokens - decodeCachedTokens);
  if (decodeCachedTokens >= NEARLY_ALL * promptTokens && decodeCachedTokens > 0)
    return { twoLegs: false, reason: "prefix-cached" };
  const isShort = uncachedTokens <= aboveTokens;
  const isAhead = Math.max(prefillCachedTokens, readbackTokens) > decodeCachedTokens;
  const ahead = readbackTokens > prefillCachedTokens ? "readback" : "prefill-cached";
  const twoLegs = { twoLegs: true, reason: isAhead ? ahead : "long-suffix" } as const;
  if (decodeInFlight > 0 && decodePromptShare > MOST_PROMPT_SHARE)
    return isShort ? { twoLegs: true, reason: "decode-busy" } : twoLegs;
  if (isShort) return { twoLegs: false, reason: "short-suffix" };
  const delayMs =
    decodeComputeMs === undefined ? undefined : decodeComputeMs * (1 + decodeInFlight);
  // What a prefill instance need not compute makes up for some of the wait.
  const savedMs = Math.max(0, (decodeComputeMs ?? 0) - (prefillComputeMs ?? decodeComputeMs ?? 0));
  if (prefillWaitMs !== undefined && delayMs !== undefined && prefillWaitMs - savedMs > delayMs)
    return { twoLegs: false, reason: "prefill-busy" };
  return twoLegs;
}
