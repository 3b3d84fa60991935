import type { OnnxAttribute, OnnxNode, OnnxTensor, OnnxType } from "./onnx-proto.js";

/** Collects the nodes and constants of a graph. Each method returns the name of its output. */
export interface GraphBuilder {
  op(
    op: string,
    inputs: readonly string[],
    options?: { attributes?: Readonly<Record<string, OnnxAttribute>>; output?: string },
  ): string;
  int64(values: readonly number[], shape?: readonly number[]): string;
  float32(values: ArrayLike<number>, shape?: readonly number[]): string;
  /** Adds a tensor that is stored elsewhere (a weight in a file). */
  tensor(tensor: OnnxTensor): string;
  readonly nodes: readonly OnnxNode[];
  readonly tensors: readonly OnnxTensor[];
}

export function graphBuilder(): GraphBuilder {
  const nodes: OnnxNode[] = [];
  const tensors: OnnxTensor[] = [];
  const constants = new Map<string, string>();

  const constant = (type: OnnxType, bytes: Uint8Array, shape: readonly number[]): string => {
    const key = `${type}[${shape.join()}]${Buffer.from(bytes).toString("base64")}`;
    const known = constants.get(key);
    if (known !== undefined) return known;
    const name = `constant_${constants.size}`;
    constants.set(key, name);
    tensors.push({ name, type, shape, data: { inline: bytes } });
    return name;
  };

  return {
    nodes,
    tensors,
    op(op, inputs, { attributes = {}, output = `${op}_${nodes.length}` } = {}) {
      nodes.push({ op, inputs, outputs: [output], attributes });
      return output;
    },
    int64(values, shape = [values.length]) {
      return constant("int64", new Uint8Array(BigInt64Array.from(values, BigInt).buffer), shape);
    },
    float32(values, shape = [values.length]) {
      return constant("float32", new Uint8Array(Float32Array.from(values).buffer), shape);
    },
    tensor(tensor) {
      tensors.push(tensor);
      return tensor.name;
    },
  };
}
