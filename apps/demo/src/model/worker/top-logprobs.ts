/**
 * The `count` most likely tokens of one row of logits, best first, of equal ones the lowest id.
 * Undefined when a logit is NaN or the largest is infinite.
 */
export function topLogprobs(
  logits: Float32Array,
  count: number,
): { tokens: Int32Array; logprobs: Float32Array } | undefined {
  let highest = Number.NEGATIVE_INFINITY;
  for (const logit of logits) {
    if (Number.isNaN(logit)) return undefined;
    if (logit > highest) highest = logit;
  }
  if (!Number.isFinite(highest)) return undefined;
  let sum = 0;
  for (const logit of logits) sum += Math.exp(logit - highest);
  const normalizer = highest + Math.log(sum);

  const best: number[] = [];
  for (let token = 0; token < logits.length; token++) {
    const logit = logits[token] as number;
    if (best.length === count && logit <= (logits[best[count - 1] as number] as number)) continue;
    let place = best.length === count ? count - 1 : best.length;
    while (place > 0 && (logits[best[place - 1] as number] as number) < logit) {
      best[place] = best[place - 1] as number;
      place--;
    }
    best[place] = token;
  }
  return {
    tokens: Int32Array.from(best),
    logprobs: Float32Array.from(best, (token) => (logits[token] as number) - normalizer),
  };
}
