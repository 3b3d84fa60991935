/** Element types of the ONNX specification (`TensorProto.DataType`). */
export const onnxTypes = { float32: 1, int64: 7 } as const;

export interface OnnxNode {
  readonly op: string;
  /** An optional input that is left out is empty. */
  readonly inputs: readonly string[];
  readonly outputs: readonly string[];
  /** A whole number is an INT, any other a FLOAT. */
  readonly attributes: Readonly<Record<string, number>>;
}

/** An input or output of the graph; a string is a symbolic dimension. */
export interface OnnxValue {
  readonly name: string;
  readonly type: keyof typeof onnxTypes;
  readonly shape: readonly (number | string)[];
}

/** A constant of the graph: its bytes (little-endian) here, or in a file beside the model. */
export interface OnnxTensor {
  readonly name: string;
  readonly type: keyof typeof onnxTypes;
  readonly shape: readonly number[];
  readonly data:
    | { inline: Uint8Array }
    | { file: string; offsetBytes: number; lengthBytes: number };
}

export interface OnnxGraph {
  readonly name: string;
  readonly nodes: readonly OnnxNode[];
  readonly tensors: readonly OnnxTensor[];
  readonly inputs: readonly OnnxValue[];
  readonly outputs: readonly OnnxValue[];
}

/** Encodes a model file (`ModelProto`) of IR version 11 and opset 23. */
export function encodeOnnx({ name, nodes, tensors, inputs, outputs }: OnnxGraph): Uint8Array {
  const graph = message([
    ...repeated(1, nodes.map(encodeNode)),
    [2, name],
    ...repeated(5, tensors.map(encodeTensor)),
    ...repeated(11, inputs.map(encodeValue)),
    ...repeated(12, outputs.map(encodeValue)),
  ]);
  const opset = message([[2, 23]]);
  return message([
    [1, 11],
    [2, "kv-demo"],
    [7, graph],
    [8, opset],
  ]);
}

function encodeNode({ op, inputs, outputs, attributes }: OnnxNode): Uint8Array {
  const encoded = Object.entries(attributes).map(([name, value]) =>
    message(
      Number.isInteger(value)
        ? [
            [1, name],
            [3, value],
            [20, 2],
          ]
        : [
            [1, name],
            [2, Float32Array.of(value)],
            [20, 1],
          ],
    ),
  );
  return message([
    ...repeated(1, inputs),
    ...repeated(2, outputs),
    [3, outputs[0] ?? ""],
    [4, op],
    ...repeated(5, encoded),
  ]);
}

function encodeTensor({ name, type, shape, data }: OnnxTensor): Uint8Array {
  const fields: Fields = [...repeated(1, shape), [2, onnxTypes[type]], [8, name]];
  if ("inline" in data) return message([...fields, [9, data.inline]]);
  const { file: location, offsetBytes: offset, lengthBytes: length } = data;
  const entries = Object.entries({ location, offset, length }).map(([key, value]) =>
    message([
      [1, key],
      [2, String(value)],
    ]),
  );
  const external = 1;
  return message([...fields, ...repeated(13, entries), [14, external]]);
}

function encodeValue({ name, type, shape }: OnnxValue): Uint8Array {
  const dimensions = shape.map((size) => message([[typeof size === "number" ? 1 : 2, size]]));
  const tensor = message([
    [1, onnxTypes[type]],
    [2, message(repeated(1, dimensions))],
  ]);
  return message([
    [1, name],
    [2, message([[1, tensor]])],
  ]);
}

type Value = number | string | Uint8Array | Float32Array;
type Fields = readonly (readonly [field: number, value: Value])[];

const repeated = (field: number, values: readonly Value[]): Fields =>
  values.map((value) => [field, value]);

/** A protobuf message of integers, one float, and texts, bytes and messages with their lengths. */
function message(fields: Fields): Uint8Array {
  const parts = fields.flatMap(([field, value]) => {
    if (typeof value === "number") return [varint(field * 8), varint(value)];
    if (value instanceof Float32Array) return [varint(field * 8 + 5), new Uint8Array(value.buffer)];
    const bytes = Buffer.from(value);
    return [varint(field * 8 + 2), varint(bytes.length), bytes];
  });
  return Buffer.concat(parts);
}

/** Of a whole number from 0. */
function varint(value: number): Uint8Array {
  const bytes: number[] = [];
  let rest = value;
  for (; rest > 0x7f; rest = Math.floor(rest / 128)) bytes.push((rest % 128) | 0x80);
  bytes.push(rest);
  return Uint8Array.from(bytes);
}
