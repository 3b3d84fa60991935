import { KvError } from "@kv/interface";
import type { DecoderConfig } from "./decoder-config.js";

/** Row-major, and read as float32. One is in memory at a time. */
export interface Weight {
  readonly shape: readonly number[];
  read(): Promise<Float32Array>;
}

export interface Weights {
  readonly where: string;
  /** By their Hugging Face names. */
  readonly byName: ReadonlyMap<string, Weight>;
}

/** The linear layers of one decoder layer, `[out, in]` as Hugging Face stores them. */
export function projectionShapes(config: DecoderConfig) {
  const { hiddenSize, intermediateSize, headDim } = config;
  const [queries, keys] = [config.heads * headDim, config.kvHeads * headDim];
  return {
    "self_attn.q_proj": [queries, hiddenSize],
    "self_attn.k_proj": [keys, hiddenSize],
    "self_attn.v_proj": [keys, hiddenSize],
    "self_attn.o_proj": [hiddenSize, queries],
    "mlp.gate_proj": [intermediateSize, hiddenSize],
    "mlp.up_proj": [intermediateSize, hiddenSize],
    "mlp.down_proj": [hiddenSize, intermediateSize],
  } as const;
}

export type Projection = keyof ReturnType<typeof projectionShapes>;

export function makeWeights(
  config: DecoderConfig,
  matrixOf: (name: string, shape: readonly [number, number]) => Float32Array,
): Weights {
  const byName = new Map<string, Weight>();
  const add = (name: string, shape: readonly number[], data: Float32Array) =>
    byName.set(`${name}.weight`, { shape, read: async () => data });
  const addMatrix = (name: string, shape: readonly [number, number]) =>
    add(name, shape, matrixOf(name, shape));
  const addNorm = (name: string, size = config.hiddenSize) =>
    add(name, [size], new Float32Array(size).fill(1));
  addMatrix("model.embed_tokens", [config.vocabSize, config.hiddenSize]);
  for (let layer = 0; layer < config.layers; layer++) {
    const prefix = `model.layers.${layer}`;
    for (const [name, shape] of Object.entries(projectionShapes(config)))
      addMatrix(`${prefix}.${name}`, shape);
    addNorm(`${prefix}.input_layernorm`);
    addNorm(`${prefix}.post_attention_layernorm`);
  }
  addNorm("model.norm");
  addMatrix("lm_head", [config.vocabSize, config.hiddenSize]);
  return { where: config.modelType, byName };
}

/**
 * Reads a weight whose shape must be the one that the config implies.
 * @throws `KV_MODEL_UNSUPPORTED` naming both shapes.
 */
export async function readWeight(
  { where, byName }: Weights,
  name: string,
  expected: readonly number[],
): Promise<Float32Array> {
  const weight = byName.get(name);
  if (weight === undefined)
    throw new KvError("KV_MODEL_UNSUPPORTED", `${where} holds no weight named ${name}`);
  const { shape } = weight;
  if (shape.length !== expected.length || shape.some((size, axis) => size !== expected[axis])) {
    throw new KvError(
      "KV_MODEL_UNSUPPORTED",
      `weight ${name} has the shape [${shape.join(", ")}], config.json implies [${expected.join(", ")}]`,
      { details: { name, shape, expected } },
    );
  }
  return weight.read();
}
