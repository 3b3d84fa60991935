import type { KvGeometry } from "./cache/kv-layout.js";

export interface EngineModel {
  readonly config: EngineModelConfig;
  /** Continues from the KV that the model keeps of a sequence, or from `past`. */
  forward(input: ForwardInput): Promise<ForwardOutput>;
  /** Only a simulated model has it, whose `forward` resolves at once. */
  layerComputed?(pass: {
    readonly startedMs: number;
    readonly tokens: number;
    readonly layer: number;
  }): Promise<void>;
  layerStored?(buffer: ArrayBuffer): void;
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
  /** Of the first token; 0 starts the sequence again. */
  position: number;
  /**
   * KV of the `position` tokens before, `[layer][KV head][token][2 * headDim]`, in place of what
   * the model holds. The buffer is detached.
   */
  past?: { tokens: number; kv: ArrayBuffer } | undefined;
  /** Candidates to return, 1 to 100. Default: 1. */
  topLogprobs?: number | undefined;
}

export interface ForwardOutput extends Candidates {
  /** KV of the new tokens, in the order of `past`; or a function that returns one layer of it. */
  newKv: ArrayBuffer | ((layer: number) => ArrayBuffer);
}

/** Best first, of equal ones the lowest id, with natural log-probabilities. */
export interface Candidates {
  topTokens: Int32Array;
  topLogprobs: Float32Array;
}
