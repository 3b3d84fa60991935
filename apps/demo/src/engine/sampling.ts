import type { Candidates } from "./engine-model.js";

/** How the next token is chosen. Temperature 0 is greedy, and then the rest does nothing. */
export interface SamplingOptions {
  readonly temperature: number;
  readonly topP?: number;
  readonly topK?: number;
  readonly seed?: number;
}

/** As many as a model answers; what is less likely is not sampled. */
const MOST_CANDIDATES = 100;

/** The sampler of one request. Equal options, seed included, choose equal tokens from equal candidates. */
export interface Sampler {
  /** Candidates that it wants. */
  readonly candidates: number;
  choose(candidates: Candidates): number;
}

const greedy: Sampler = { candidates: 1, choose: ({ topTokens }) => topTokens[0] ?? 0 };

export function createSampler(options: SamplingOptions, next: () => number): Sampler {
  const { temperature, topP = 1, topK = 0, seed } = options;
  if (temperature === 0) return greedy;
  const random = seed === undefined ? next : seededUniform(seed);
  return {
    candidates: topK > 0 ? Math.min(topK, MOST_CANDIDATES) : MOST_CANDIDATES,
    choose({ topTokens, topLogprobs }) {
      const best = topLogprobs[0] ?? 0;
      const weights = Array.from(topLogprobs, (logprob) => Math.exp((logprob - best) / temperature));
      // The smallest set of tokens whose share reaches topP; at least one.
      const bound = topP * weights.reduce((sum, weight) => sum + weight, 0);
      let kept = 0;
      let reached = 0;
      while (kept < weights.length && (kept === 0 || reached < bound)) reached += weights[kept++] ?? 0;
      let left = random() * reached;
      for (let i = 0; i < kept; i++) {
        left -= weights[i] ?? 0;
        if (left < 0) return topTokens[i] ?? 0;
      }
      return topTokens[kept - 1] ?? 0;
    },
  };
}

/** Uniform numbers in [0, 1) from a counter whose bits are mixed. */
function seededUniform(seed: number): () => number {
  let counter = seed | 0;
  return () => {
    counter = (counter + 0x9e3779b9) | 0;
    let mixed = Math.imul(counter ^ (counter >>> 16), 0x21f0aaad);
    mixed = Math.imul(mixed ^ (mixed >>> 15), 0x735a2d97);
    return ((mixed ^ (mixed >>> 15)) >>> 0) / 2 ** 32;
  };
}
