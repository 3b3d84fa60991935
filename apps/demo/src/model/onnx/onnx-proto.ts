/** Element types of the ONNX specification (`TensorProto.DataType`). */
export const onnxTypes = { float32: 1, int64: 7, float16: 10 } as const;
export type OnnxType = keyof typeof onnxTypes;

/** An INT or INTS attribute. */
type OnnxAttribute = number | readonly number[];

export interface OnnxNode {
  op: string;
  inputs: readonly string[];
  outputs: readonly string[];
  attributes: Readonly<Record<string, OnnxAttribute>>;
}

/** An input or output of the graph; a string is a symbolic dimension. */
export interface OnnxValue {
  name: string;
  type: OnnxType;
  shape: readonly (number | string)[];
}

/** A constant of the graph: its bytes (little-endian) here, or in a file beside the model. */
export interface OnnxTensor {
  name: string;
  type: OnnxType;
  shape: readonly number[];
  data: { inline: Uint8Array } | { file: string; offsetBytes: number; lengthBytes: number };
}

export interface OnnxGraph {
  name: string;
  nodes: readonly OnnxNode[];
  tensors: readonly OnnxTensor[];
  inputs: readonly OnnxValue[];
  outputs: readonly OnnxValue[];
}

/** Encodes a model file (`ModelProto`) with the default operator set in one version. */
export function encodeOnnx(
  graph: OnnxGraph,
  { irVersion, opset, producer }: { irVersion: number; opset: number; producer: string },
): Uint8Array {
  const body = new MessageWriter();
  for (const node of graph.nodes) body.message(1, encodeNode(node));
  body.text(2, graph.name);
  for (const tensor of graph.tensors) body.message(5, encodeTensor(tensor));
  for (const input of graph.inputs) body.message(11, encodeValue(input));
  for (const output of graph.outputs) body.message(12, encodeValue(output));
  return new MessageWriter()
    .integer(1, irVersion)
    .text(2, producer)
    .message(7, body)
    .message(8, new MessageWriter().text(1, "").integer(2, opset))
    .finish();
}

function encodeNode(node: OnnxNode): MessageWriter {
  const message = new MessageWriter();
  for (const input of node.inputs) message.text(1, input);
  for (const output of node.outputs) message.text(2, output);
  message.text(3, node.outputs[0] ?? "").text(4, node.op);
  for (const [name, value] of Object.entries(node.attributes))
    message.message(5, encodeAttribute(name, value));
  return message;
}

function encodeAttribute(name: string, value: OnnxAttribute): MessageWriter {
  const message = new MessageWriter().text(1, name);
  if (typeof value === "number") return message.integer(3, BigInt(value)).integer(20, 2);
  for (const item of value) message.integer(8, BigInt(item));
  return message.integer(20, 7);
}

function encodeTensor(tensor: OnnxTensor): MessageWriter {
  const message = new MessageWriter();
  for (const size of tensor.shape) message.integer(1, size);
  message.integer(2, onnxTypes[tensor.type]).text(8, tensor.name);
  if ("inline" in tensor.data) return message.bytes(9, tensor.data.inline);
  const entries = {
    location: tensor.data.file,
    offset: String(tensor.data.offsetBytes),
    length: String(tensor.data.lengthBytes),
  };
  for (const [key, value] of Object.entries(entries)) {
    message.message(13, new MessageWriter().text(1, key).text(2, value));
  }
  return message.integer(14, 1);
}

function encodeValue(value: OnnxValue): MessageWriter {
  const shape = new MessageWriter();
  for (const size of value.shape) {
    const dimension = new MessageWriter();
    shape.message(
      1,
      typeof size === "number" ? dimension.integer(1, size) : dimension.text(2, size),
    );
  }
  const tensor = new MessageWriter().integer(1, onnxTypes[value.type]).message(2, shape);
  return new MessageWriter().text(1, value.name).message(2, new MessageWriter().message(1, tensor));
}

const wireTypes = { varint: 0, length: 2 } as const;

/**
 * Writes one protobuf message; fields appear in the order of the calls. Enough for ONNX: varints,
 * strings, messages.
 */
class MessageWriter {
  readonly #parts: Uint8Array[] = [];

  /** A non-negative safe integer, or any int64 as bigint (negative ones take ten bytes). */
  integer(field: number, value: number | bigint): this {
    return this.#add(field, wireTypes.varint, varint(BigInt(value)));
  }

  text(field: number, value: string): this {
    return this.bytes(field, Buffer.from(value));
  }

  bytes(field: number, value: Uint8Array): this {
    return this.#add(field, wireTypes.length, varint(BigInt(value.length)), value);
  }

  message(field: number, value: MessageWriter): this {
    return this.bytes(field, value.finish());
  }

  finish(): Uint8Array {
    return Buffer.concat(this.#parts);
  }

  #add(field: number, type: number, ...parts: Uint8Array[]): this {
    this.#parts.push(varint(BigInt(field * 8 + type)), ...parts);
    return this;
  }
}

function varint(value: bigint): Uint8Array {
  const bytes: number[] = [];
  let rest = BigInt.asUintN(64, value);
  for (; rest > 0x7fn; rest >>= 7n) bytes.push(Number(rest & 0x7fn) | 0x80);
  bytes.push(Number(rest));
  return Uint8Array.from(bytes);
}
