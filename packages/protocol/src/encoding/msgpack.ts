import { KvError } from "@kv/interface";
import { Decoder, Encoder, ExtensionCodec } from "@msgpack/msgpack";
import { checkMsgpackHeaders, DEFAULT_MAX_VALUES, type MsgpackLimits } from "./msgpack-limits.js";

export type { MsgpackLimits } from "./msgpack-limits.js";

/** Default limits: enough for a handshake with 100,000 regions. A real handshake of a large model is about 100 KB. */
export const MSGPACK_LIMITS: MsgpackLimits = {
  maxBytes: 32 * 2 ** 20,
  maxDepth: 16,
  maxItems: 200_000,
  maxValues: DEFAULT_MAX_VALUES,
};

/** A number that msgpack must write as a float64 even when it is whole, such as a clock: Python's msgspec refuses an integer there. */
export class Float64 {
  constructor(
    /** The number. */
    readonly value: number,
  ) {}
}

/** Refuses objects that the library would silently write as an empty map or as a map of private fields. */
const plainDataOnly = new ExtensionCodec();
plainDataOnly.tryToEncode = (value: unknown) => {
  if (![Float64, Map, Set, Date].some((type) => value instanceof type)) return null;
  throw new KvError(
    "KV_INTERNAL",
    `msgpack: a ${value?.constructor.name} inside a message cannot be encoded`,
  );
};

const encoder = new Encoder({ useBigInt64: false, extensionCodec: plainDataOnly });

/**
 * Encodes a value to the same bytes as Python's msgspec: the shortest form of each integer (uint64 above 2^32), `bin` for bytes, `str` for
 * strings, map entries in insertion order. A `Float64` is allowed at the top level only. Integers must be safe integers; beyond 2^53 they
 * would be written as floats. Errors: `KV_INTERNAL` for a `Float64`, Map, Set or Date inside the value.
 */
export function encodeMsgpack(value: unknown): Uint8Array {
  if (value instanceof Float64) {
    const bytes = new Uint8Array(9);
    bytes[0] = 0xcb;
    new DataView(bytes.buffer).setFloat64(1, value.value);
    return bytes;
  }
  return encoder.encode(value);
}

/**
 * Decodes one whole message. Integers and floats both become numbers, so a whole float equals the integer. `what` names the message in
 * errors. Errors: `KV_WIRE_LIMIT_EXCEEDED`; `KV_WIRE_MALFORMED` for anything but one msgpack value up to the last byte, for integers
 * beyond 2^53, extension types, map keys that are not strings and strings that are not UTF-8.
 */
export function decodeMsgpack(
  bytes: Uint8Array,
  what: string,
  limits: MsgpackLimits = MSGPACK_LIMITS,
): unknown {
  checkMsgpackHeaders(bytes, what, limits);
  let value: unknown;
  try {
    value = new Decoder({ useBigInt64: true }).decode(bytes);
  } catch (error) {
    throw KvError.from(
      error,
      "KV_WIRE_MALFORMED",
      `${what}: not a msgpack value of ${bytes.byteLength} bytes`,
    );
  }
  return withSafeIntegers(value, what);
}

/** Recursion is bounded: the depth was checked before. */
function withSafeIntegers(value: unknown, what: string): unknown {
  if (typeof value === "bigint") {
    const number = Number(value);
    if (!Number.isSafeInteger(number)) {
      throw new KvError("KV_WIRE_MALFORMED", `${what}: the integer ${value} does not fit in 53 bits`);
    }
    return number;
  }
  if (Array.isArray(value)) return value.map((item) => withSafeIntegers(item, what));
  // Copied: a view would keep the whole message alive and would change when its buffer is reused. (A Buffer's `slice` is a view.)
  if (value instanceof Uint8Array) return new Uint8Array(value);
  if (typeof value === "object" && value !== null) {
    return Object.fromEntries(
      Object.entries(value).map(([key, item]) => [key, withSafeIntegers(item, what)]),
    );
  }
  return value;
}
