import type { Candidates } from "./engine-model.js";

/** How the next token is chosen. Temperature 0 is greedy; the other options have no effect then. */
export interface SamplingOptions {
  readonly temperature: number;
  readonly topP?: number | undefined;
  /** Sample from this number of tokens; 0 for no limit (the default). */
  readonly topK?: number | undefined;
  readonly seed?: number | undefined;
}

/** The most candidates that a model returns; less likely tokens are not sampled. */
const MAX_CANDIDATES = 100;

/**
 * The sampler of one request. With the same options and seed it chooses the same tokens from the
 * same candidates.
 */
export interface Sampler {
  readonly candidates: number;
  choose(candidates: Candidates): number;
  /**
   * Takes note of a token that a sampler with the same options has chosen elsewhere: the next ones
   * are as if it had been chosen here.
   */
  skip(): void;
}

const greedy: Sampler = {
  candidates: 1,
  choose: ({ topTokens }) => topTokens[0] ?? 0,
  skip: () => {},
};

/**
 * The options as `ConnectorRequest.samplingKey`: two samplers with the same key choose a first
 * token alike.
 */
export function samplingKey({ temperature, topP = 1, topK = 0, seed }: SamplingOptions): string {
  return temperature === 0 ? "greedy" : JSON.stringify([temperature, topP, topK, seed ?? null]);
}

export function createSampler(options: SamplingOptions, next: () => number): Sampler {
  const { temperature, topP = 1, topK = 0, seed } = options;
  if (temperature === 0) return greedy;
  const random = seed === undefined ? next : seededUniform(seed);
  return {
    candidates: topK > 0 ? Math.min(topK, MAX_CANDIDATES) : MAX_CANDIDATES,
    choose({ topTokens, topLogprobs }) {
      const best = topLogprobs[0] ?? 0;
      const weights = Array.from(topLogprobs, (logprob) =>
        Math.exp((logprob - best) / temperature),
      );
      // The smallest set of tokens whose probability reaches topP; at least one token.
      const bound = topP * weights.reduce((sum, weight) => sum + weight, 0);
      let kept = 0;
      let reached = 0;
      while (kept < weights.length && (kept === 0 || reached < bound))
        reached += weights[kept++] ?? 0;
      let left = random() * reached;
      for (let i = 0; i < kept; i++) {
        left -= weights[i] ?? 0;
        if (left < 0) return topTokens[i] ?? 0;
      }
      return topTokens[kept - 1] ?? 0;
    },
    skip: () => void random(),
  };
}

/** Uniform numbers in [0, 1) from a counter with mixed bits. */
function seededUniform(seed: number): () => number {
  let counter = seed | 0;
  return () => {
    counter = (counter + 0x9e3779b9) | 0;
    let mixed = Math.imul(counter ^ (counter >>> 16), 0x21f0aaad);
    mixed = Math.imul(mixed ^ (mixed >>> 15), 0x735a2d97);
    return ((mixed ^ (mixed >>> 15)) >>> 0) / 2 ** 32;
  };
}
