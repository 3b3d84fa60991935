/** Element types of the ONNX specification (`TensorProto.DataType`). */
export const onnxTypes = { float32: 1, int64: 7, bool: 9, float16: 10 } as const;
export type OnnxType = keyof typeof onnxTypes;

export type OnnxAttribute = { int: number } | { ints: readonly number[] } | { float: number };

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
  const body = protobufMessage();
  for (const node of graph.nodes) body.message(1, encodeNode(node));
  body.text(2, graph.name);
  for (const tensor of graph.tensors) body.message(5, encodeTensor(tensor));
  for (const input of graph.inputs) body.message(11, encodeValue(input));
  for (const output of graph.outputs) body.message(12, encodeValue(output));
  return protobufMessage()
    .integer(1, irVersion)
    .text(2, producer)
    .message(7, body)
    .message(8, protobufMessage().text(1, "").integer(2, opset))
    .finish();
}

function encodeNode(node: OnnxNode): MessageWriter {
  const message = protobufMessage();
  for (const input of node.inputs) message.text(1, input);
  for (const output of node.outputs) message.text(2, output);
  message.text(3, node.outputs[0] ?? "").text(4, node.op);
  for (const [name, value] of Object.entries(node.attributes))
    message.message(5, encodeAttribute(name, value));
  return message;
}

function encodeAttribute(name: string, value: OnnxAttribute): MessageWriter {
  const message = protobufMessage().text(1, name);
  if ("float" in value) return message.float(2, value.float).integer(20, 1);
  if ("int" in value) return message.integer(3, BigInt(value.int)).integer(20, 2);
  for (const item of value.ints) message.integer(8, BigInt(item));
  return message.integer(20, 7);
}

function encodeTensor(tensor: OnnxTensor): MessageWriter {
  const message = protobufMessage();
  for (const size of tensor.shape) message.integer(1, size);
  message.integer(2, onnxTypes[tensor.type]).text(8, tensor.name);
  if ("inline" in tensor.data) return message.bytes(9, tensor.data.inline);
  const entries = {
    location: tensor.data.file,
    offset: String(tensor.data.offsetBytes),
    length: String(tensor.data.lengthBytes),
  };
  for (const [key, value] of Object.entries(entries)) {
    message.message(13, protobufMessage().text(1, key).text(2, value));
  }
  return message.integer(14, 1);
}

function encodeValue(value: OnnxValue): MessageWriter {
  const shape = protobufMessage();
  for (const size of value.shape) {
    const dimension = protobufMessage();
    shape.message(1, typeof size === "number" ? dimension.integer(1, size) : dimension.text(2, size));
  }
  const tensor = protobufMessage().integer(1, onnxTypes[value.type]).message(2, shape);
  return protobufMessage().text(1, value.name).message(2, protobufMessage().message(1, tensor));
}

/** Writes one protobuf message; fields appear in the order of the calls. Enough for ONNX: varints, floats, strings, messages. */
export interface MessageWriter {
  /** A non-negative safe integer, or any int64 as bigint (negative ones take ten bytes). */
  integer(field: number, value: number | bigint): MessageWriter;
  /** A float32 (wire type 5). */
  float(field: number, value: number): MessageWriter;
  text(field: number, value: string): MessageWriter;
  bytes(field: number, value: Uint8Array): MessageWriter;
  message(field: number, value: MessageWriter): MessageWriter;
  finish(): Uint8Array;
}

const wireTypes = { varint: 0, length: 2, fixed32: 5 } as const;

const encoder = new TextEncoder();

function protobufMessage(): MessageWriter {
  const parts: Uint8Array[] = [];
  const tag = (field: number, type: number): void => {
    parts.push(varint(BigInt(field * 8 + type)));
  };
  const writer: MessageWriter = {
    integer(field, value) {
      tag(field, wireTypes.varint);
      parts.push(varint(BigInt(value)));
      return writer;
    },
    float(field, value) {
      tag(field, wireTypes.fixed32);
      const bytes = new Uint8Array(4);
      new DataView(bytes.buffer).setFloat32(0, value, true);
      parts.push(bytes);
      return writer;
    },
    text: (field, value) => writer.bytes(field, encoder.encode(value)),
    bytes(field, value) {
      tag(field, wireTypes.length);
      parts.push(varint(BigInt(value.length)), value);
      return writer;
    },
    message: (field, value) => writer.bytes(field, value.finish()),
    finish() {
      const result = new Uint8Array(parts.reduce((length, part) => length + part.length, 0));
      let offset = 0;
      for (const part of parts) {
        result.set(part, offset);
        offset += part.length;
      }
      return result;
    },
  };
  return writer;
}

function varint(value: bigint): Uint8Array {
  const bytes: number[] = [];
  let rest = BigInt.asUintN(64, value);
  for (; rest > 0x7fn; rest >>= 7n) bytes.push(Number(rest & 0x7fn) | 0x80);
  bytes.push(Number(rest));
  return Uint8Array.from(bytes);
}
