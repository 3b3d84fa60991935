import { KvError } from "@kv/interface";
import { Decoder, Encoder, ExtensionCodec } from "@msgpack/msgpack";
import { checkMsgpackHeaders, DEFAULT_MAX_VALUES, type MsgpackLimits } from "./msgpack-headers.js";

export type { MsgpackLimits } from "./msgpack-headers.js";

/** Enough for 100,000 regions; a real handshake of a large model is some 100 KB. */
export const MSGPACK_LIMITS: MsgpackLimits = {
  maxBytes: 32 * 2 ** 20,
  maxDepth: 16,
  maxItems: 200_000,
  maxValues: DEFAULT_MAX_VALUES,
};

/** A number that msgpack must write as float64 although it may be whole: a clock. Python's msgspec refuses an integer there. */
export class Float64 {
  constructor(readonly value: number) {}
}

/** Refuses what the library would write as an empty map or as a map of private fields, without a word. */
const plainDataOnly = new ExtensionCodec();
plainDataOnly.tryToEncode = (value: unknown) => {
  if (![Float64, Map, Set, Date].some((type) => value instanceof type)) return null;
  throw new KvError("KV_INTERNAL", `msgpack: a ${value?.constructor.name} within a message has no form here`);
};

const encoder = new Encoder({ useBigInt64: false, extensionCodec: plainDataOnly });

/**
 * Encodes as msgspec does: the shortest form of every integer, uint64 above 2^32, `bin` for bytes, `str` for strings, map entries in the
 * order given. A `Float64` may stand at the top only. Integers must be safe ones: beyond 2^53 they would be written as floats.
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
 * Decodes one whole message. Integers come as numbers, and so do floats: a whole float reads as the integer that it equals.
 * Errors: `KV_WIRE_LIMIT_EXCEEDED`; `KV_WIRE_MALFORMED` for anything that is not one msgpack value to the last byte, for integers beyond
 * 2^53, for extension types, for keys that are no strings and for strings that are not UTF-8.
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

/** Depth is bounded by now, so recursion is. */
function withSafeIntegers(value: unknown, what: string): unknown {
  if (typeof value === "bigint") {
    const number = Number(value);
    if (!Number.isSafeInteger(number)) {
      throw new KvError("KV_WIRE_MALFORMED", `${what}: the integer ${value} does not fit into 53 bits`);
    }
    return number;
  }
  if (Array.isArray(value)) return value.map((item) => withSafeIntegers(item, what));
  // A copy: a view would keep the whole message alive, and change with a buffer that is used again. (A Buffer's `slice` is a view.)
  if (value instanceof Uint8Array) return new Uint8Array(value);
  if (typeof value === "object" && value !== null) {
    return Object.fromEntries(
      Object.entries(value).map(([key, item]) => [key, withSafeIntegers(item, what)]),
    );
  }
  return value;
}
