import { KvError } from "@kv/interface";
import type { DecoderConfig } from "./decoder-config.js";

/**
 * Weights by their Hugging Face names, row-major, converted to float32. One tensor is in memory at
 * a time.
 */
export interface WeightSource {
  has(name: string): boolean;
  shape(name: string): readonly number[];
  read(name: string): Promise<Float32Array>;
  close(): Promise<void>;
}

/** Weights in memory. `unknown` makes the error of a name that there is not. */
export function weightsOf(
  weights: ReadonlyMap<string, { readonly shape: readonly number[]; readonly data: Float32Array }>,
  unknown: (name: string) => KvError,
): WeightSource {
  const found = (name: string) => {
    const weight = weights.get(name);
    if (weight === undefined) throw unknown(name);
    return weight;
  };
  return {
    has: (name) => weights.has(name),
    shape: (name) => found(name).shape,
    read: async (name) => found(name).data,
    async close() {},
  };
}

/** The linear layers of one decoder layer, in the order in which Hugging Face constructs them. */
export const projections = [
  "self_attn.q_proj",
  "self_attn.k_proj",
  "self_attn.v_proj",
  "self_attn.o_proj",
  "mlp.gate_proj",
  "mlp.up_proj",
  "mlp.down_proj",
] as const;

export type Projection = (typeof projections)[number];

/** `[out, in]`, as Hugging Face stores it. */
export function projectionShape(
  config: DecoderConfig,
  projection: Projection,
): readonly [number, number] {
  const { hiddenSize: hidden, intermediateSize: intermediate, headDim } = config;
  switch (projection) {
    case "self_attn.q_proj":
      return [config.heads * headDim, hidden];
    case "self_attn.k_proj":
    case "self_attn.v_proj":
      return [config.kvHeads * headDim, hidden];
    case "self_attn.o_proj":
      return [hidden, config.heads * headDim];
    case "mlp.gate_proj":
    case "mlp.up_proj":
      return [intermediate, hidden];
    case "mlp.down_proj":
      return [hidden, intermediate];
  }
}

/**
 * Reads a weight whose shape must be the one that the config implies.
 *
 * @throws KvError KV_MODEL_UNSUPPORTED naming both shapes.
 */
export async function readWeight(
  source: WeightSource,
  name: string,
  expected: readonly number[],
): Promise<Float32Array> {
  const shape = source.shape(name);
  if (shape.length !== expected.length || shape.some((size, axis) => size !== expected[axis])) {
    throw new KvError(
      "KV_MODEL_UNSUPPORTED",
      `weight ${name} has the shape [${shape.join(", ")}], config.json implies [${expected.join(", ")}]`,
      { details: { name, shape, expected } },
    );
  }
  return await source.read(name);
}

/** Transposes `[rows, columns]`, in tiles so that both sides stay in the CPU cache. */
export function transposed(
  data: Float32Array,
  [rows, columns]: readonly [number, number],
): Float32Array {
  const result = new Float32Array(data.length);
  const tile = 32;
  for (let top = 0; top < rows; top += tile) {
    const bottom = Math.min(top + tile, rows);
    for (let left = 0; left < columns; left += tile) {
      const right = Math.min(left + tile, columns);
      for (let row = top; row < bottom; row++) {
        for (let column = left; column < right; column++) {
          result[column * rows + row] = data[row * columns + column] as number;
        }
      }
    }
  }
  return result;
}
