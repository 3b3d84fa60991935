import type { DecoderConfig } from "../weights/decoder-config.js";
import { type Projection, projectionShapes, readWeight, type Weights } from "../weights/weights.js";
import {
  type OnnxGraph,
  type OnnxNode,
  type OnnxTensor,
  type OnnxValue,
  onnxTypes,
} from "./onnx-proto.js";

export interface DecoderGraphOptions {
  readonly config: DecoderConfig;
  readonly weights: Weights;
  readonly store: (data: Float32Array) => Promise<OnnxTensor["data"]>;
}

/** The decoder as a graph of ONNX operators. Methods return the name of an output. */
export class DecoderGraph {
  readonly #options: DecoderGraphOptions;
  readonly #nodes: OnnxNode[] = [];
  readonly #tensors: OnnxTensor[] = [];

  private constructor(options: DecoderGraphOptions) {
    this.#options = options;
  }

  static async build(options: DecoderGraphOptions): Promise<OnnxGraph> {
    const graph = new DecoderGraph(options);
    await graph.#decoder();
    const { modelType: name, layers, vocabSize, kvHeads, headDim } = options.config;
    const kv = (prefix: string, tokens: string): OnnxValue[] =>
      Array.from({ length: 2 * layers }, (_, i) => ({
        name: `${prefix}.${Math.floor(i / 2)}.${i % 2 === 0 ? "key" : "value"}`,
        type: "float32",
        shape: ["batch", kvHeads, tokens, headDim],
      }));
    return {
      name,
      nodes: graph.#nodes,
      tensors: graph.#tensors,
      inputs: [
        { name: "input_ids", type: "int64", shape: ["batch", "seq"] },
        { name: "position_ids", type: "int64", shape: ["batch", "seq"] },
        ...kv("past_key_values", "past"),
      ],
      outputs: [
        { name: "logits", type: "float32", shape: ["batch", 1, vocabSize] },
        ...kv("present", "total"),
      ],
    };
  }

  async #decoder(): Promise<void> {
    const { weights, config } = this.#options;
    const vocabulary = [config.vocabSize, config.hiddenSize] as const;
    const embedding = await readWeight(weights, "model.embed_tokens.weight", vocabulary);
    const embedded = await this.#stored("embed_tokens", vocabulary, embedding);
    const rotary = this.#rotary();
    let hidden = this.#op("Gather", [embedded, "input_ids"]);
    for (let layer = 0; layer < config.layers; layer++)
      hidden = await this.#layer(layer, hidden, rotary);
    const bounds = [-1, 2 ** 31, 1].map((value) => this.#int64([value]));
    const last = this.#op("Slice", [hidden, ...bounds]);
    const normed = await this.#norm("model.norm", config.hiddenSize, last);
    const head = config.tieWordEmbeddings
      ? embedding
      : await readWeight(weights, "lm_head.weight", vocabulary);
    const matrix = await this.#storedTransposed("lm_head", vocabulary, head);
    this.#op("MatMul", [normed, matrix], {}, ["logits"]);
  }

  async #layer(layer: number, input: string, rotary: readonly string[]): Promise<string> {
    const { hiddenSize } = this.#options.config;
    const prefix = `model.layers.${layer}`;
    const before = await this.#norm(`${prefix}.input_layernorm`, hiddenSize, input);
    const middle = this.#op("Add", [input, await this.#attention(layer, before, rotary)]);
    const normed = await this.#norm(`${prefix}.post_attention_layernorm`, hiddenSize, middle);
    const gate = await this.#linear(prefix, "mlp.gate_proj", normed);
    const up = await this.#linear(prefix, "mlp.up_proj", normed);
    const activated = this.#op("Mul", [this.#op("Mul", [gate, this.#op("Sigmoid", [gate])]), up]);
    return this.#op("Add", [middle, await this.#linear(prefix, "mlp.down_proj", activated)]);
  }

  async #attention(layer: number, input: string, rotary: readonly string[]): Promise<string> {
    const { heads, kvHeads } = this.#options.config;
    const prefix = `model.layers.${layer}`;
    const rotated = async (part: "q" | "k", num_heads: number) => {
      const flat = await this.#linear(prefix, `self_attn.${part}_proj`, input);
      const normed = await this.#normOfHeads(`${prefix}.self_attn.${part}_norm`, num_heads, flat);
      return this.#op("RotaryEmbedding", [normed, ...rotary], { num_heads });
    };
    const query = await rotated("q", heads);
    const key = await rotated("k", kvHeads);
    const value = await this.#linear(prefix, "self_attn.v_proj", input);
    const kv = (prefix: string) => [`${prefix}.${layer}.key`, `${prefix}.${layer}.value`];
    const attended = this.#op(
      "Attention",
      [query, key, value, "", ...kv("past_key_values")],
      { is_causal: 1, q_num_heads: heads, kv_num_heads: kvHeads },
      [`attended.${layer}`, ...kv("present")],
    );
    return this.#linear(prefix, "self_attn.o_proj", attended);
  }

  /** Qwen3 normalises queries and keys per head; the others have no such weight. */
  async #normOfHeads(name: string, heads: number, value: string): Promise<string> {
    const { config, weights } = this.#options;
    if (!weights.byName.has(`${name}.weight`)) return value;
    const reshaped = (of: string, shape: number[]) => this.#op("Reshape", [of, this.#int64(shape)]);
    const split = reshaped(value, [0, 0, heads, config.headDim]);
    const normed = await this.#norm(name, config.headDim, split);
    return reshaped(normed, [0, 0, heads * config.headDim]);
  }

  /** Cosine and sine of position times frequency, `[batch, seq, head_dim / 2]`. */
  #rotary(): readonly string[] {
    const { headDim, ropeTheta } = this.#options.config;
    const frequencies = Float32Array.from({ length: headDim / 2 }, (_, i) => {
      const exponent = Math.fround(Math.fround(2 * i) / headDim);
      return 1 / Math.fround(ropeTheta ** exponent);
    });
    const inline = new Uint8Array(frequencies.buffer);
    const shape = [frequencies.length];
    const frequency = this.#tensor({ name: "frequency", type: "float32", shape, data: { inline } });
    const positions = this.#op("Cast", ["position_ids"], { to: onnxTypes.float32 });
    const column = this.#op("Unsqueeze", [positions, this.#int64([2])]);
    const angles = this.#op("Mul", [column, frequency]);
    return [this.#op("Cos", [angles]), this.#op("Sin", [angles])];
  }

  async #norm(name: string, size: number, value: string): Promise<string> {
    const data = await readWeight(this.#options.weights, `${name}.weight`, [size]);
    const weight = await this.#stored(name, [size], data);
    return this.#op("RMSNormalization", [value, weight], {
      epsilon: this.#options.config.rmsNormEps,
    });
  }

  async #linear(prefix: string, projection: Projection, value: string): Promise<string> {
    const { config, weights } = this.#options;
    const name = `${prefix}.${projection}`;
    const shape = projectionShapes(config)[projection];
    const data = await readWeight(weights, `${name}.weight`, shape);
    const product = this.#op("MatMul", [value, await this.#storedTransposed(name, shape, data)]);
    if (!weights.byName.has(`${name}.bias`)) return product;
    const size = shape.slice(0, 1);
    const bias = await readWeight(weights, `${name}.bias`, size);
    return this.#op("Add", [product, await this.#stored(`${name}.bias`, size, bias)]);
  }

  /** Returns the first output. */
  #op(
    op: string,
    inputs: readonly string[],
    attributes: OnnxNode["attributes"] = {},
    outputs = [`${op}_${this.#nodes.length}`],
  ): string {
    this.#nodes.push({ op, inputs, outputs, attributes });
    return outputs[0] ?? "";
  }

  #int64(values: readonly number[]): string {
    const inline = new Uint8Array(BigInt64Array.from(values, BigInt).buffer);
    const name = `constant_${this.#tensors.length}`;
    return this.#tensor({ name, type: "int64", shape: [values.length], data: { inline } });
  }

  async #stored(name: string, shape: readonly number[], data: Float32Array): Promise<string> {
    return this.#tensor({ name, type: "float32", shape, data: await this.#options.store(data) });
  }

  #storedTransposed(
    name: string,
    [rows, columns]: readonly [number, number],
    data: Float32Array,
  ): Promise<string> {
    return this.#stored(name, [columns, rows], transposed(data, rows, columns));
  }

  #tensor(tensor: OnnxTensor): string {
    this.#tensors.push(tensor);
    return tensor.name;
  }
}

/** In tiles, so that both sides stay in the CPU cache. */
function transposed(data: Float32Array, rows: number, columns: number): Float32Array {
  const result = new Float32Array(data.length);
  const tile = 32;
  for (let top = 0; top < rows; top += tile) {
    const bottom = Math.min(top + tile, rows);
    for (let left = 0; left < columns; left += tile) {
      const right = Math.min(left + tile, columns);
      for (let row = top; row < bottom; row++) {
        for (let column = left; column < right; column++)
          result[column * rows + row] = data[row * columns + column] as number;
      }
    }
  }
  return result;
}
