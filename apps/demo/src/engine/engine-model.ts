import type { KvGeometry } from "./cache/kv-layout.js";

/**
 * The interface of a model to the engine. Implementations: `model/model.ts`,
 * `model/simulated-model.ts`, and one in the tests.
 */
export interface EngineModel {
  readonly config: EngineModelConfig;
  /**
   * Computes tokens of one sequence. The model keeps the KV that it has computed. It continues from
   * that KV, or from `past` when that is given.
   */
  forward(input: ForwardInput): Promise<ForwardOutput>;
  /**
   * Resolves when a layer of a pass is computed. Only a simulated model has it, whose `forward`
   * resolves at once.
   */
  layerComputed?(pass: {
    readonly startedMs: number;
    readonly tokens: number;
    readonly layer: number;
  }): Promise<void>;
  layerStored?(buffer: ArrayBuffer): void;
  /** The model never uses KV that it has not computed, so `past` need not be read for it. */
  readonly ignoresPast?: boolean | undefined;
  dropSequence(sequenceId: string): Promise<void>;
}

export interface EngineModelConfig extends KvGeometry {
  readonly vocabSize: number;
  readonly maxModelLen: number;
  readonly eosTokenIds: readonly number[];
}

export interface ForwardInput {
  sequenceId: string;
  tokens: Int32Array;
  /**
   * The position of the first token, which is the number of tokens before it. 0 starts the sequence
   * again.
   */
  position: number;
  /**
   * KV of the `position` tokens before, `[layer][KV head][token][2 * headDim]`, in place of what
   * the model holds of the sequence. The buffer is transferred: it is detached afterwards. Default:
   * the model continues with its own KV.
   */
  past?: { tokens: number; kv: ArrayBuffer } | undefined;
  /** Number of most likely next tokens to return, 1 to 100. Default: 1. */
  topLogprobs?: number | undefined;
}

export interface ForwardOutput extends Candidates {
  /**
   * KV of the new tokens, in the order of `past`; or a function that returns one layer of it. The
   * buffer is transferred.
   */
  newKv: ArrayBuffer | ((layer: number) => ArrayBuffer);
}

/**
 * The most likely next tokens, best first (of equal ones the lowest id), with their natural
 * log-probabilities.
 */
export interface Candidates {
  topTokens: Int32Array;
  topLogprobs: Float32Array;
}
