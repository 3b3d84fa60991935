import type { Candidates } from "./engine-model.js";

/** Temperature 0 is greedy; the other options have no effect then. */
export interface SamplingOptions {
  readonly temperature: number;
  readonly topP?: number | undefined;
  /** Sample from this number of tokens; 0 for no limit (the default). */
  readonly topK?: number | undefined;
  readonly seed?: number | undefined;
}

const MAX_CANDIDATES = 100;

/** Two samplers with the same key choose a first token alike. */
export function samplingKey({ temperature, topP = 1, topK = 0, seed }: SamplingOptions): string {
  return temperature === 0 ? "greedy" : JSON.stringify([temperature, topP, topK, seed ?? null]);
}

/** Of one request. With the same options and seed it chooses the same tokens. */
export class Sampler {
  /** How many the model is asked for. */
  readonly candidates: number;
  readonly #temperature: number;
  readonly #topP: number;
  readonly #random: () => number;

  constructor({ temperature, topP = 1, topK = 0, seed }: SamplingOptions, next: () => number) {
    this.#temperature = temperature;
    this.#topP = topP;
    this.#random = seed === undefined ? next : seededUniform(seed);
    const most = topK > 0 ? Math.min(topK, MAX_CANDIDATES) : MAX_CANDIDATES;
    this.candidates = temperature === 0 ? 1 : most;
  }

  choose({ topTokens, topLogprobs }: Candidates): number {
    if (this.#temperature === 0) return topTokens[0] ?? 0;
    const best = topLogprobs[0] ?? 0;
    const weights = Array.from(topLogprobs, (logprob) =>
      Math.exp((logprob - best) / this.#temperature),
    );
    // The smallest set of tokens whose probability reaches topP; at least one token.
    const bound = this.#topP * weights.reduce((sum, weight) => sum + weight, 0);
    let kept = 0;
    let reached = 0;
    while (kept < weights.length && (kept === 0 || reached < bound))
      reached += weights[kept++] ?? 0;
    let left = this.#random() * reached;
    for (let i = 0; i < kept; i++) {
      left -= weights[i] ?? 0;
      if (left < 0) return topTokens[i] ?? 0;
    }
    return topTokens[kept - 1] ?? 0;
  }

  /** A sampler with the same options has chosen the next token elsewhere. */
  skip(): void {
    if (this.#temperature > 0) this.#random();
  }
}

function seededUniform(seed: number): () => number {
  let counter = seed | 0;
  return () => {
    counter = (counter + 0x9e3779b9) | 0;
    let mixed = Math.imul(counter ^ (counter >>> 16), 0x21f0aaad);
    mixed = Math.imul(mixed ^ (mixed >>> 15), 0x735a2d97);
    return ((mixed ^ (mixed >>> 15)) >>> 0) / 2 ** 32;
  };
}
