import type { KvGeometry } from "./cache/kv-layout.js";

/** The part of a model that the engine uses (`model/model.ts` is one), so that tests run on a model made of arithmetic. */
export interface EngineModel {
  readonly config: EngineModelConfig;
  /**
   * Computes tokens of one sequence. The model keeps what it has computed of it; without `past` it goes on from there, and with
   * it, it goes on from what is given.
   */
  forward(input: ForwardInput): Promise<ForwardOutput>;
  /** Resolves when a layer of a pass over so many tokens is computed; only of a simulated model, which answers `forward` at once. */
  layerComputed?(pass: {
    readonly startedMs: number;
    readonly tokens: number;
    readonly layer: number;
  }): Promise<void>;
  /** It never looks at KV that it has not computed: `past` is not read for it. */
  readonly ignoresPast?: boolean;
  /** Forgets a sequence; unknown ones are ignored. */
  dropSequence(sequenceId: string): Promise<void>;
}

export interface EngineModelConfig extends KvGeometry {
  readonly vocabSize: number;
  /** Tokens in a sequence at most, prompt and output together. */
  readonly maxModelLen: number;
  readonly eosTokenIds: readonly number[];
}

export interface ForwardInput {
  sequenceId: string;
  tokens: Int32Array;
  /** Of the first of `tokens`. */
  position: number;
  /** KV of the `position` tokens before, `[layer][KV head][token][2 * headDim]`. Given away: the caller's buffer is detached. */
  past?: { tokens: number; kv: ArrayBuffer };
  /** How many of the most likely next tokens to answer. */
  topLogprobs?: number;
}

export interface ForwardOutput extends Candidates {
  /** KV of the tokens given, in the order of `past`; or what answers a layer of it, until it is asked for the next. */
  newKv: ArrayBuffer | ((layer: number) => ArrayBuffer);
}

/** The most likely next tokens, best first, with their natural log-probabilities. */
export interface Candidates {
  topTokens: Int32Array;
  topLogprobs: Float32Array;
}
