import { type CompletionOutcome, complete } from "./client.js";

export interface NegativeControl {
  /** The tokens with one block of the received KV zeroed; they must differ from those of the reference. */
  readonly changed: boolean;
  /** The same prompt once more, undamaged. */
  readonly restored: boolean;
}

/**
 * Shows that the comparison of tokens can fail: with one transferred block of the prompt zeroed before it is used, the tokens change;
 * without, they are the reference's again.
 */
export async function runNegativeControl(options: {
  readonly url: string;
  readonly requestId: string;
  readonly promptTokens: readonly number[];
  readonly expected: readonly number[];
}): Promise<NegativeControl> {
  const { url, requestId, promptTokens, expected } = options;
  const ask = (suffix: string, zeroBlock?: number): Promise<CompletionOutcome> =>
    complete({
      url,
      requestId: `${requestId}-${suffix}`,
      promptTokens,
      maxTokens: expected.length,
      ...(zeroBlock === undefined ? {} : { zeroBlock }),
    });
  const same = ({ tokens }: CompletionOutcome) => sameTokens(tokens, expected);
  return { changed: !same(await ask("zeroed", 0)), restored: same(await ask("again")) };
}

export function sameTokens(a: readonly number[], b: readonly number[]): boolean {
  return a.length === b.length && a.every((token, i) => token === b[i]);
}
