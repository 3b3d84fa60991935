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
  const [rows, width] = [layers * kvHeads, 2 * headDim];
  const ofToken = rows * width;
  /** Token after token, each `[layer][head][2 * headDim]`. */
  const kept = new Map<string, readonly number[]>();

  const kvOf = (token: number, position: number) =>
    Array.from({ length: ofToken }, (_, i) => (token * 31 + position * 17 + i * 7 + 1) % 509);

  const nextToken = (kv: readonly number[]) =>
    kv.reduce((sum, value, at) => {
      const [position, i] = [Math.floor(at / ofToken), at % ofToken];
      return (sum + value * (((position * 13 + i * 5) % 89) + 1)) % 1_000_003;
    }, 7) % vocabSize;

  /** Of `outer` times `inner` groups of `width` values, each inner one after the other. */
  const regrouped = (values: ArrayLike<number>, outer: number, inner: number) =>
    Array.from(values, (_, to) => {
      const [group, i] = [Math.floor(to / width), to % width];
      const from = (group % outer) * inner + Math.floor(group / outer);
      return values[from * width + i] ?? 0;
    });

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
        past === undefined
          ? (kept.get(sequenceId) ?? [])
          : regrouped(new Float32Array(past.kv), rows, past.tokens);
      if (before.length !== position * ofToken)
        throw new Error(`${sequenceId}: the KV of ${position} tokens is not there`);
      const fresh = Array.from(tokens, (token, i) => kvOf(token, position + i)).flat();
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
        newKv: Float32Array.from(regrouped(fresh, tokens.length, rows)).buffer,
      };
    },
    async dropSequence(sequenceId) {
      kept.delete(sequenceId);
    },
    generate(prompt, count) {
      const all = [...prompt];
      while (all.length < prompt.length + count) all.push(nextToken(all.flatMap(kvOf)));
      return all.slice(prompt.length);
    },
  };
  return model;
}
