import type { DecoderConfig } from "../weights/decoder-config.js";
import {
  type Projection,
  projectionShape,
  readWeight,
  transposed,
  type WeightSource,
} from "../weights/weights.js";
import {
  type OnnxGraph,
  type OnnxNode,
  type OnnxTensor,
  type OnnxType,
  type OnnxValue,
  onnxTypes,
} from "./onnx-proto.js";

/** Stores the bytes of a tensor and returns their location. */
export type TensorStore = (data: Float32Array) => Promise<OnnxTensor["data"]>;

interface Scope {
  graph: GraphBuilder;
  config: DecoderConfig;
  weights: WeightSource;
  kvType: "float32" | "float16";
  store: TensorStore;
}

interface Shared {
  cos: string;
  sin: string;
  /**
   * Added to the scores: 0 where a query may see a key, the lowest float32 elsewhere.
   * `[batch, 1, 1, seq, past + seq]`.
   */
  mask: string;
}

const lowestFloat32 = -3.4028234663852886e38;

/** The decoder as a graph of basic operators, so that ONNX Runtime can fuse known patterns. */
export async function decoderGraph(options: Omit<Scope, "graph">): Promise<OnnxGraph> {
  const scope: Scope = { ...options, graph: new GraphBuilder() };
  const { graph, config, kvType } = scope;
  const shared = { ...rotary(scope), mask: causalMask(scope) };

  const vocabulary = [config.vocabSize, config.hiddenSize] as const;
  const embedding = await readWeight(scope.weights, "model.embed_tokens.weight", vocabulary);
  let hidden = graph.op("Gather", [
    await stored(scope, "embed_tokens", vocabulary, embedding),
    "input_ids",
  ]);
  for (let layer = 0; layer < config.layers; layer++)
    hidden = await decoderLayer(scope, layer, hidden, shared);

  const last = graph.op("Slice", [
    hidden,
    graph.int64([-1]),
    graph.int64([2 ** 31]),
    graph.int64([1]),
  ]);
  const normed = await rmsNorm(scope, "model.norm.weight", config.hiddenSize, last);
  const head = config.tieWordEmbeddings
    ? embedding
    : await readWeight(scope.weights, "lm_head.weight", vocabulary);
  const headName = await stored(
    scope,
    "lm_head",
    [vocabulary[1], vocabulary[0]],
    transposed(head, vocabulary),
  );
  graph.op("MatMul", [normed, headName], {}, "logits");

  const inputs: OnnxValue[] = [
    { name: "input_ids", type: "int64", shape: ["batch", "seq"] },
    { name: "attention_mask", type: "int64", shape: ["batch", "total"] },
    { name: "position_ids", type: "int64", shape: ["batch", "seq"] },
  ];
  const outputs: OnnxValue[] = [
    { name: "logits", type: "float32", shape: ["batch", 1, config.vocabSize] },
  ];
  for (let layer = 0; layer < config.layers; layer++) {
    for (const part of ["key", "value"]) {
      const shape = (tokens: string) => ["batch", config.kvHeads, tokens, config.headDim];
      inputs.push({ name: `past_key_values.${layer}.${part}`, type: kvType, shape: shape("past") });
      outputs.push({ name: `present.${layer}.${part}`, type: kvType, shape: shape("total") });
    }
  }
  return { name: config.modelType, nodes: graph.nodes, tensors: graph.tensors, inputs, outputs };
}

async function decoderLayer(
  scope: Scope,
  layer: number,
  input: string,
  shared: Shared,
): Promise<string> {
  const { graph, config } = scope;
  const prefix = `model.layers.${layer}`;
  const norm = (name: string, value: string) =>
    rmsNorm(scope, `${prefix}.${name}.weight`, config.hiddenSize, value);
  const attended = await attention(scope, layer, await norm("input_layernorm", input), shared);
  const middle = graph.op("Add", [input, attended]);
  const normed = await norm("post_attention_layernorm", middle);
  const gate = await linear(scope, prefix, "mlp.gate_proj", normed);
  const up = await linear(scope, prefix, "mlp.up_proj", normed);
  const activated = graph.op("Mul", [graph.op("Mul", [gate, graph.op("Sigmoid", [gate])]), up]);
  return graph.op("Add", [middle, await linear(scope, prefix, "mlp.down_proj", activated)]);
}

/**
 * Grouped-query attention. Queries become `[batch, kv_heads, group, seq, head_dim]` and meet keys
 * of `[batch, kv_heads, 1, total, head_dim]`, so that keys are broadcast, not copied per query
 * head.
 */
async function attention(
  scope: Scope,
  layer: number,
  input: string,
  shared: Shared,
): Promise<string> {
  const { graph, config, kvType } = scope;
  const { heads, kvHeads, headDim } = config;
  const prefix = `model.layers.${layer}`;

  const perHead = async (part: "q" | "k" | "v", count: number): Promise<string> => {
    const flat = await linear(scope, prefix, `self_attn.${part}_proj`, input);
    let split = graph.op("Reshape", [flat, graph.int64([0, 0, count, headDim])]);
    const norm = `${prefix}.self_attn.${part}_norm.weight`;
    // Qwen3 normalises queries and keys per head, before the rotary embedding; the others have no
    // such weight.
    if (part !== "v" && scope.weights.has(norm)) split = await rmsNorm(scope, norm, headDim, split);
    return graph.op("Transpose", [split], { perm: [0, 2, 1, 3] });
  };
  const query = rotated(scope, await perHead("q", heads), shared);
  const key = rotated(scope, await perHead("k", kvHeads), shared);
  const value = await perHead("v", kvHeads);

  const withPast = (part: "key" | "value", fresh: string): string => {
    const cast = (name: string, type: keyof typeof onnxTypes) =>
      graph.op("Cast", [name], { to: onnxTypes[type] });
    const present = graph.op(
      "Concat",
      [`past_key_values.${layer}.${part}`, kvType === "float32" ? fresh : cast(fresh, kvType)],
      { axis: 2 },
      `present.${layer}.${part}`,
    );
    const wide = kvType === "float32" ? present : cast(present, "float32");
    return graph.op("Unsqueeze", [wide, graph.int64([2])]);
  };
  const keys = graph.op("Transpose", [withPast("key", key)], { perm: [0, 1, 2, 4, 3] });
  const values = withPast("value", value);

  const grouped = graph.op("Reshape", [
    query,
    graph.int64([0, kvHeads, heads / kvHeads, -1, headDim]),
  ]);
  const scores = graph.op("Mul", [
    graph.op("MatMul", [grouped, keys]),
    graph.float32([headDim ** -0.5], []),
  ]);
  const weights = graph.op("Softmax", [graph.op("Add", [scores, shared.mask])], { axis: -1 });
  const perQueryHead = graph.op("Reshape", [
    graph.op("MatMul", [weights, values]),
    graph.int64([0, heads, -1, headDim]),
  ]);
  const joined = graph.op("Reshape", [
    graph.op("Transpose", [perQueryHead], { perm: [0, 2, 1, 3] }),
    graph.int64([0, 0, heads * headDim]),
  ]);
  return await linear(scope, prefix, "self_attn.o_proj", joined);
}

/**
 * x * cos + rotate_half(x) * sin, where rotate_half swaps the halves of the head and negates the
 * first.
 */
function rotated({ graph, config }: Scope, value: string, { cos, sin }: Shared): string {
  const half = config.headDim / 2;
  const part = (from: number, to: number) =>
    graph.op("Slice", [value, graph.int64([from]), graph.int64([to]), graph.int64([3])]);
  const turned = graph.op(
    "Concat",
    [graph.op("Neg", [part(half, config.headDim)]), part(0, half)],
    { axis: 3 },
  );
  return graph.op("Add", [graph.op("Mul", [value, cos]), graph.op("Mul", [turned, sin])]);
}

/** Cosine and sine of position times frequency, `[batch, 1, seq, head_dim]`. */
function rotary({ graph, config }: Scope): { cos: string; sin: string } {
  const half = config.headDim / 2;
  const frequencies = Float32Array.from({ length: half }, (_, i) => {
    const exponent = Math.fround(Math.fround(2 * i) / config.headDim);
    return 1 / Math.fround(config.ropeTheta ** exponent);
  });
  const positions = graph.op("Cast", ["position_ids"], { to: onnxTypes.float32 });
  const angles = graph.op("Mul", [
    graph.op("Unsqueeze", [positions, graph.int64([1, 3])]),
    graph.float32(frequencies, [1, 1, 1, half]),
  ]);
  const whole = graph.op("Concat", [angles, angles], { axis: 3 });
  return { cos: graph.op("Cos", [whole]), sin: graph.op("Sin", [whole]) };
}

function causalMask({ graph }: Scope): string {
  const length = (input: string, axis: number): string =>
    graph.op("Squeeze", [
      graph.op("Shape", [input], { start: axis, end: axis + 1 }),
      graph.int64([0]),
    ]);
  const past = length("past_key_values.0.key", 2);
  const total = graph.op("Add", [past, length("input_ids", 1)]);
  const one = graph.int64([1], []);
  const queries = graph.op("Unsqueeze", [graph.op("Range", [past, total, one]), graph.int64([1])]);
  const keys = graph.op("Range", [graph.int64([0], []), total, one]);
  const causal = graph.op("LessOrEqual", [keys, queries]);
  const kept = graph.op("Unsqueeze", [
    graph.op("Greater", ["attention_mask", graph.int64([0], [])]),
    graph.int64([1, 2, 3]),
  ]);
  const allowed = graph.op("And", [causal, kept]);
  return graph.op("Where", [allowed, graph.float32([0], []), graph.float32([lowestFloat32], [])]);
}

async function rmsNorm(scope: Scope, name: string, size: number, value: string): Promise<string> {
  const { graph, config } = scope;
  const weight = await stored(scope, name, [size], await readWeight(scope.weights, name, [size]));
  const squares = graph.op("Pow", [value, graph.float32([2], [])]);
  const variance = graph.op("ReduceMean", [squares, graph.int64([-1])], { keepdims: 1 });
  const root = graph.op("Sqrt", [
    graph.op("Add", [variance, graph.float32([config.rmsNormEps], [])]),
  ]);
  return graph.op("Mul", [graph.op("Div", [value, root]), weight]);
}

async function linear(
  scope: Scope,
  prefix: string,
  projection: Projection,
  value: string,
): Promise<string> {
  const { graph, config, weights } = scope;
  const name = `${prefix}.${projection}`;
  const [rows, columns] = projectionShape(config, projection);
  const data = transposed(await readWeight(weights, `${name}.weight`, [rows, columns]), [
    rows,
    columns,
  ]);
  const product = graph.op("MatMul", [
    value,
    await stored(scope, `${name}.weight`, [columns, rows], data),
  ]);
  if (!weights.has(`${name}.bias`)) return product;
  const bias = await readWeight(weights, `${name}.bias`, [rows]);
  return graph.op("Add", [product, await stored(scope, `${name}.bias`, [rows], bias)]);
}

async function stored(
  scope: Scope,
  name: string,
  shape: readonly number[],
  data: Float32Array,
): Promise<string> {
  return scope.graph.tensor({ name, type: "float32", shape, data: await scope.store(data) });
}

/** Collects the nodes and constants of a graph. Each method returns the name of its output. */
class GraphBuilder {
  readonly nodes: OnnxNode[] = [];
  readonly tensors: OnnxTensor[] = [];
  readonly #constants = new Map<string, string>();

  op(
    op: string,
    inputs: readonly string[],
    attributes: OnnxNode["attributes"] = {},
    output = `${op}_${this.nodes.length}`,
  ): string {
    this.nodes.push({ op, inputs, outputs: [output], attributes });
    return output;
  }

  int64(values: readonly number[], shape: readonly number[] = [values.length]): string {
    return this.#constant(
      "int64",
      new Uint8Array(BigInt64Array.from(values, BigInt).buffer),
      shape,
    );
  }

  float32(values: ArrayLike<number>, shape: readonly number[] = [values.length]): string {
    return this.#constant("float32", new Uint8Array(Float32Array.from(values).buffer), shape);
  }

  /** Adds a tensor that is stored elsewhere (a weight in a file). */
  tensor(tensor: OnnxTensor): string {
    this.tensors.push(tensor);
    return tensor.name;
  }

  #constant(type: OnnxType, bytes: Uint8Array, shape: readonly number[]): string {
    const key = `${type}[${shape.join()}]${Buffer.from(bytes).toString("base64")}`;
    const name = this.#constants.get(key) ?? `constant_${this.#constants.size}`;
    if (!this.#constants.has(key))
      this.tensors.push({ name, type, shape, data: { inline: bytes } });
    this.#constants.set(key, name);
    return name;
  }
}
