/** What is known about a request before its first leg. */
export interface DisaggregationInputs {
  /** Tokens of the prompt, exact or estimated; undefined where nothing is known. */
  readonly promptTokens: number | undefined;
  /** Tokens of the prompt, from its first, that the decode instance has in its prefix cache; 0 where it is not known. */
  readonly decodeCachedTokens: number;
  /** How long the prompt would wait for a prefill instance, in milliseconds; undefined where it is not known. */
  readonly prefillWaitMs: number | undefined;
  /** How long the decode instance would compute the rest of the prompt, in milliseconds; undefined where it is not known. */
  readonly decodeComputeMs: number | undefined;
  /** Requests in flight at the decode instance: each of them waits while it computes a prompt. */
  readonly decodeInFlight: number;
  /** Share of its time that the decode instance would spend on prompts which it computes itself, this one and those just before; 0 where it is not known. */
  readonly decodePromptShare: number;
}

/**
 * Why a request has two legs, or one. Two: `long-suffix`, `unknown-length`, `decode-busy` (few tokens, but the decode instance computes other prompts, and its answers come late).
 * One, at a decode instance: `short-suffix` (few tokens to compute), `prefix-cached` (nearly the whole prompt is cached there), `prefill-busy` (waiting for a prefill instance would take longer than computing
 * delays this request and those in flight at the decode instance).
 */
export type DisaggregationReason =
  | "long-suffix"
  | "unknown-length"
  | "decode-busy"
  | "short-suffix"
  | "prefix-cached"
  | "prefill-busy";

/** Of a prompt, the share that is nearly the whole. */
const NEARLY_ALL = 0.95;
/** The largest share of its time that a decode instance with requests in flight computes prompts: its tokens come later by about as much. */
const MOST_PROMPT_SHARE = 0.2;

/**
 * Whether a prefill instance is to compute the prompt. `aboveTokens`: from how many uncached tokens on two legs pay.
 */
export function decideDisaggregation(
  {
    promptTokens,
    decodeCachedTokens,
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
  if (decodeInFlight > 0 && decodePromptShare > MOST_PROMPT_SHARE)
    return { twoLegs: true, reason: isShort ? "decode-busy" : "long-suffix" };
  if (isShort) return { twoLegs: false, reason: "short-suffix" };
  const delayMs = decodeComputeMs === undefined ? undefined : decodeComputeMs * (1 + decodeInFlight);
  if (prefillWaitMs !== undefined && delayMs !== undefined && prefillWaitMs > delayMs)
    return { twoLegs: false, reason: "prefill-busy" };
  return { twoLegs: true, reason: "long-suffix" };
}
