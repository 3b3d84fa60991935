import type {
  EngineModel,
  EngineModelConfig,
  ForwardInput,
} from "../../src/engine/engine-model.js";

export interface ArithmeticModel extends EngineModel {
  /** The calls of `forward`, in order. */
  readonly calls: {
    sequenceId: string;
    tokens: number[];
    position: number;
    pastTokens: number | undefined;
  }[];
  /** Number of sequences that it holds. */
  readonly sequences: number;
  /** The expected tokens of a prompt. */
  generate(prompt: readonly number[], count: number): number[];
  /** Called before each step; a rejection fails the step. */
  before: (input: ForwardInput) => Promise<void>;
}

/**
 * A model for tests. Its KV encodes token and position, and its next token depends on every value
 * of the KV before it, so that wrong, missing or shifted KV changes the output. All values are
 * small integers, exact in float32.
 */
export function arithmeticModel(options: Partial<EngineModelConfig> = {}): ArithmeticModel {
  const config: EngineModelConfig = {
    layers: 2,
    kvHeads: 4,
    headDim: 2,
    vocabSize: 997,
    maxModelLen: 512,
    eosTokenIds: [],
    ...options,
  };
  const { layers, kvHeads, headDim, vocabSize } = config;
  const rows = layers * kvHeads;
  const width = 2 * headDim;
  /** Per token one array `[layer][head][2 * headDim]`. */
  const kept = new Map<string, number[][]>();

  function kvOf(token: number, position: number): number[] {
    return Array.from(
      { length: rows * width },
      (_, i) => (token * 31 + position * 17 + i * 7 + 1) % 509,
    );
  }

  function nextToken(kv: readonly number[][]): number {
    let sum = 7;
    kv.forEach((values, position) => {
      for (let i = 0; i < values.length; i++) {
        sum = (sum + (values[i] ?? 0) * (((position * 13 + i * 5) % 89) + 1)) % 1_000_003;
      }
    });
    return sum % vocabSize;
  }

  function pack(kv: readonly number[][]): ArrayBuffer {
    const packed = new Float32Array(rows * kv.length * width);
    for (let row = 0; row < rows; row++) {
      kv.forEach((values, token) => {
        packed.set(values.slice(row * width, (row + 1) * width), (row * kv.length + token) * width);
      });
    }
    return packed.buffer;
  }

  function unpack(buffer: ArrayBuffer, tokens: number): number[][] {
    const packed = new Float32Array(buffer);
    return Array.from({ length: tokens }, (_, token) =>
      Array.from({ length: rows }, (_, row) =>
        Array.from(
          packed.subarray((row * tokens + token) * width, (row * tokens + token + 1) * width),
        ),
      ).flat(),
    );
  }

  const model: ArithmeticModel = {
    config,
    calls: [],
    before: async () => {},
    get sequences() {
      return kept.size;
    },
    async forward(input) {
      const { sequenceId, tokens, position, past } = input;
      model.calls.push({ sequenceId, tokens: [...tokens], position, pastTokens: past?.tokens });
      await model.before(input);
      const before =
        past === undefined ? (kept.get(sequenceId) ?? []) : unpack(past.kv, past.tokens);
      if (before.length !== position)
        throw new Error(`${sequenceId}: ${before.length} tokens are there, not ${position}`);
      const fresh = Array.from(tokens, (token, i) => kvOf(token, position + i));
      const all = [...before, ...fresh];
      kept.set(sequenceId, all);
      const best = nextToken(all);
      const topTokens = Int32Array.from(
        { length: input.topLogprobs ?? 1 },
        (_, i) => (best + i) % vocabSize,
      );
      return {
        topTokens,
        topLogprobs: Float32Array.from(topTokens, (_, i) => -i),
        newKv: pack(fresh),
      };
    },
    async dropSequence(sequenceId) {
      kept.delete(sequenceId);
    },
    generate(prompt, count) {
      const kv = prompt.map(kvOf);
      const made: number[] = [];
      while (made.length < count) {
        const token = nextToken(kv);
        kv.push(kvOf(token, kv.length));
        made.push(token);
      }
      return made;
    },
  };
  return model;
}
