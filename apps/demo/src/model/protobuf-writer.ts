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

export function protobufMessage(): MessageWriter {
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
