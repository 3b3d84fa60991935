/** What is known about a request before its first leg. */
export interface DisaggregationInputs {
  /** Exact or estimated. */
  readonly promptTokens: number | undefined;
  /** Prefix that the decode instance has cached. */
  readonly decodeCachedTokens: number;
  /** Prefix that a prefill instance has cached, or can fetch from a KV source. */
  readonly prefillCachedTokens?: number;
  /** Prefix that a prefill instance can read from a decode instance. */
  readonly readbackTokens?: number;
  /** Time for a prefill instance to read and compute. */
  readonly prefillComputeMs?: number | undefined;
  /** Time that the prompt would wait for a prefill instance. */
  readonly prefillWaitMs?: number | undefined;
  /** Time for the decode instance to compute the rest. */
  readonly decodeComputeMs?: number | undefined;
  /** Requests that wait while it computes a prompt. */
  readonly decodeInFlight: number;
  /** Share of time that the decode instance spends on prompts: this one and those just before. */
  readonly decodePromptShare?: number;
}

/**
 * Why a request has one or two legs.
 *
 * Two legs:
 * - `long-suffix`: many tokens to compute
 * - `readback`: a prefill instance reads the start from a decode instance
 * - `prefill-cached`: a prefill instance has or can fetch more than the decode instance has
 * - `unknown-length`
 * - `decode-busy`: few tokens, but other prompts already delay the decode instance
 *
 * One leg, at a decode instance:
 * - `short-suffix`: few tokens to compute
 * - `prefix-cached`: nearly all is cached there
 * - `prefill-busy`: waiting for a prefill instance takes longer than computing here delays this and
 *   other requests
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

const NEARLY_ALL = 0.95;
/** Prompts delay a busy decode instance's tokens by about this share. */
const MOST_PROMPT_SHARE = 0.2;

/**
 * Decides whether a prefill instance computes the prompt. Two legs pay above `aboveTokens` uncached
 * tokens.
 */
export function decideDisaggregation(
  {
    promptTokens,
    decodeCachedTokens,
    prefillCachedTokens = 0,
    readbackTokens = 0,
    prefillComputeMs,
    prefillWaitMs,
    decodeComputeMs,
    decodeInFlight,
    decodePromptShare = 0,
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
  // Saved computation makes up for some of the wait.
  const savedMs = Math.max(0, (decodeComputeMs ?? 0) - (prefillComputeMs ?? decodeComputeMs ?? 0));
  if (prefillWaitMs !== undefined && delayMs !== undefined && prefillWaitMs - savedMs > delayMs)
    return { twoLegs: false, reason: "prefill-busy" };
  return twoLegs;
}
