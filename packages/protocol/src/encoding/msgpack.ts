import { isUtf8 } from "node:buffer";
import { KvError } from "@kv/interface";
import { Encoder, ExtensionCodec } from "@msgpack/msgpack";

/** Limits of a peer's message. */
export interface MsgpackLimits {
  /** Length of the whole message in bytes. */
  readonly maxBytes: number;
  readonly maxDepth: number;
  /** Elements of one list, or entries of one map. */
  readonly maxItems: number;
  /**
   * Values in the whole message, keys included: one byte of it can announce a list of many.
   * @default 2_000_000
   */
  readonly maxValues?: number | undefined;
  /** Bytes of one string, or of one binary value. @default no limit but that of the message */
  readonly maxTextBytes?: number | undefined;
  /** Integers beyond 2^53 are bigints. @default false: they are malformed */
  readonly bigIntegers?: boolean | undefined;
  /**
   * A list of 1000 and more integers from 0 to 2^31 - 1, such as token ids, is an `Int32Array`.
   * @default false: it is a list
   */
  readonly int32Lists?: boolean | undefined;
}

const DEFAULT_MAX_VALUES = 2_000_000;

/**
 * Default limits: enough for a handshake with 100,000 regions. A real handshake of a large model is
 * about 100 KB.
 */
export const MSGPACK_LIMITS: MsgpackLimits = {
  maxBytes: 32 * 2 ** 20,
  maxDepth: 16,
  maxItems: 200_000,
  maxValues: DEFAULT_MAX_VALUES,
};

/**
 * A number that msgpack must write as a float64 even when it is whole, such as a clock: Python's
 * msgspec refuses an integer there.
 */
export class Float64 {
  constructor(readonly value: number) {}
}

/**
 * Refuses objects that the library would silently write as an empty map or as a map of private
 * fields.
 */
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
 * Encodes a value to the same bytes as Python's msgspec: the shortest form of each integer (uint64
 * above 2^32), `bin` for bytes, `str` for strings, map entries in insertion order. A `Float64` is
 * allowed at the top level only. Integers must be safe integers; beyond 2^53 they would be written
 * as floats.
 *
 * @throws `KV_INTERNAL` for a `Float64`, Map, Set or Date inside the value.
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
 * Decodes one whole message. Integers and floats both become numbers, so a whole float equals the
 * integer. Bytes are copied: a view would keep the whole message alive and would change when its
 * buffer is reused. `what` names the message in errors.
 *
 * @throws `KV_WIRE_LIMIT_EXCEEDED`; `KV_WIRE_MALFORMED` with the byte offset for anything but one
 * msgpack value up to the last byte, for integers beyond 2^53, extension types, map keys that are
 * not strings or are `__proto__`, and strings that are not UTF-8.
 */
export function decodeMsgpack(
  bytes: Uint8Array,
  what: string,
  limits: MsgpackLimits = MSGPACK_LIMITS,
): unknown {
  return atOnce(decodeMsgpackInSteps(bytes, what, limits));
}

/** Makes all steps of a decoder, and returns what it has decoded. */
export function atOnce<T>(steps: Iterator<unknown, T>): T {
  let next = steps.next();
  while (next.done !== true) next = steps.next();
  return next.value;
}

/** Values that are decoded in one step: about 30 microseconds. */
const STEP_VALUES = 1000;

/** Integers of a list that are decoded in one step: also about 30 microseconds. */
const STEP_INTEGERS = 4000;
/** A shorter list stays a list. */
const LONG_LIST = 1000;

/** A list or a map whose end has not come. */
interface Container {
  readonly value: unknown[] | Record<string, unknown>;
  key: string | undefined;
  readonly items: number;
  left: number;
}

/**
 * As `decodeMsgpack`, but yields after each step, so that the caller can serve others between the
 * steps. A list takes no more memory than its values can need: a few bytes can announce one of
 * 2^32.
 */
export function* decodeMsgpackInSteps(
  bytes: Uint8Array,
  what: string,
  limits: MsgpackLimits,
): Generator<undefined, unknown> {
  const {
    maxBytes,
    maxDepth,
    maxItems,
    maxValues = DEFAULT_MAX_VALUES,
    maxTextBytes = maxBytes,
  } = limits;
  const { int32Lists = false } = limits;
  const buffer = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const open: Container[] = [];
  let values = 0;
  let at = 0;

  const malformed = (reason: string) =>
    new KvError("KV_WIRE_MALFORMED", `${what}: ${reason} at byte ${at}`);
  const tooMuch = (found: string, limit: number) =>
    new KvError("KV_WIRE_LIMIT_EXCEEDED", `${what}: ${found}; the limit is ${limit}`, {
      details: { limit },
    });
  /** Passes `size` bytes, and returns where they begin. */
  const take = (size: number): number => {
    if (at + size > buffer.length) throw malformed("truncated");
    at += size;
    return at - size;
  };
  const unsigned = (size: number): number => buffer.readUIntBE(take(size), size);
  const big = (integer: bigint): number | bigint => {
    const number = Number(integer);
    if (Number.isSafeInteger(number)) return number;
    if (limits.bigIntegers === true) return integer;
    throw malformed(`the integer ${integer}, which does not fit in 53 bits, ends`);
  };
  const part = (size: number): Buffer => {
    if (size > maxTextBytes) throw tooMuch(`a string of ${size} bytes`, maxTextBytes);
    return buffer.subarray(take(size), at);
  };
  const text = (head: number): string => {
    const utf8 = part(head <= 0xbf ? head & 0x1f : unsigned(2 ** (head - 0xd9)));
    if (!isUtf8(utf8)) throw malformed("a string that is not UTF-8 ends");
    return utf8.toString();
  };
  const scalar = (head: number): unknown => {
    if (head <= 0x7f) return head;
    if (head >= 0xe0) return head - 0x100;
    if (isText(head)) return text(head);
    if (head === 0xc0) return null;
    if (head === 0xc2 || head === 0xc3) return head === 0xc3;
    if (head >= 0xc4 && head <= 0xc6) return new Uint8Array(part(unsigned(2 ** (head - 0xc4))));
    if (head === 0xca) return buffer.readFloatBE(take(4));
    if (head === 0xcb) return buffer.readDoubleBE(take(8));
    if (head >= 0xcc && head <= 0xce) return unsigned(2 ** (head - 0xcc));
    if (head >= 0xd0 && head <= 0xd2)
      return buffer.readIntBE(take(2 ** (head - 0xd0)), 2 ** (head - 0xd0));
    if (head === 0xcf) return big(buffer.readBigUInt64BE(take(8)));
    if (head === 0xd3) return big(buffer.readBigInt64BE(take(8)));
    throw malformed(`type byte 0x${head.toString(16)} is not accepted`);
  };
  const container = (items: number, isMap: boolean): Container => {
    if (items > maxItems)
      throw tooMuch(`${items} items in one ${isMap ? "map" : "list"}`, maxItems);
    const left = isMap ? 2 * items : items;
    values += left;
    if (values > maxValues) throw tooMuch(`${values} values`, maxValues);
    if (open.length >= maxDepth) throw tooMuch(`${open.length + 1} levels of nesting`, maxDepth);
    // A long list has room for all its elements, if the message can have them: V8 would copy one
    // that grows to millions again and again.
    const hasRoom = !int32Lists && items >= LONG_LIST && items <= buffer.length - at;
    return {
      value: isMap ? {} : new Array<unknown>(hasRoom ? items : 0),
      key: undefined,
      items,
      left,
    };
  };
  const opened = (head: number): Container | undefined => {
    if (head >= 0x80 && head <= 0x9f) return container(head & 0x0f, head <= 0x8f);
    if (head >= 0xdc && head <= 0xdf)
      return container(unsigned(head % 2 === 0 ? 2 : 4), head >= 0xde);
    return undefined;
  };

  /**
   * The elements of a list, where all are integers from 0 to 2^31 - 1; else undefined, and nothing
   * is passed.
   */
  function* integers(count: number): Generator<undefined, Int32Array | undefined> {
    const begin = at;
    // Each element has at least a byte.
    if (count > buffer.length - at) return undefined;
    const list = new Int32Array(count);
    for (let read = 0; read < count; read += 1) {
      if (read > 0 && read % STEP_INTEGERS === 0) yield;
      const head = buffer[at] ?? 0xc0;
      at += 1;
      let value = head;
      if (head > 0x7f) {
        // uint8, uint16 and uint32.
        const size = head >= 0xcc && head <= 0xce ? 2 ** (head - 0xcc) : buffer.length;
        value = at + size <= buffer.length ? buffer.readUIntBE(at, size) : -1;
        at += size;
      }
      if (value < 0 || value > 0x7fffffff) {
        at = begin;
        return undefined;
      }
      list[read] = value;
    }
    return list;
  }

  if (buffer.length > maxBytes) throw tooMuch(`${buffer.length} bytes`, maxBytes);
  for (let read = 1; ; read += 1) {
    if (read % STEP_VALUES === 0) yield;
    let into = open.at(-1);
    const head = buffer[take(1)] ?? 0;
    if (into?.key === undefined && into !== undefined && !Array.isArray(into.value)) {
      if (!isText(head)) throw malformed("a map key that is not a string");
      into.key = text(head);
      if (into.key === "__proto__") throw malformed("a map key __proto__ ends");
      into.left -= 1;
      continue;
    }
    const begun = opened(head);
    const isLong = int32Lists && Array.isArray(begun?.value) && begun.items >= LONG_LIST;
    const list = isLong ? yield* integers(begun.items) : undefined;
    if (begun !== undefined && begun.left > 0 && list === undefined) {
      open.push(begun);
      continue;
    }
    let value: unknown = begun === undefined ? scalar(head) : (list ?? begun.value);
    // The value is complete, and so may be those that it is in.
    for (; into !== undefined; into = open.at(-1)) {
      if (Array.isArray(into.value)) into.value[into.items - into.left] = value;
      else into.value[into.key ?? ""] = value;
      into.key = undefined;
      into.left -= 1;
      if (into.left > 0) break;
      open.pop();
      value = into.value;
    }
    if (into !== undefined) continue;
    if (at !== buffer.length) throw malformed(`${buffer.length - at} bytes after the value`);
    return value;
  }
}

const isText = (head: number) => (head >= 0xa0 && head <= 0xbf) || (head >= 0xd9 && head <= 0xdb);
