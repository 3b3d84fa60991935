import { isUtf8 } from "node:buffer";
import { type BlockIds, KvError } from "@kv/interface";
import { Encoder, ExtensionCodec } from "@msgpack/msgpack";

/** Limits of a peer's message. */
export interface MsgpackLimits {
  readonly maxBytes: number;
  readonly maxDepth: number;
  /** Elements of one list, or entries of one map. */
  readonly maxItems: number;
  /**
   * Values in the whole message, keys included: few bytes can announce many.
   * @default 2_000_000
   */
  readonly maxValues?: number | undefined;
  /** Bytes of one string or binary value. @default no limit but that of the message */
  readonly maxTextBytes?: number | undefined;
  /** Integers beyond 2^53 are bigints. @default false: they are malformed */
  readonly bigIntegers?: boolean | undefined;
  /**
   * A list of 1000 or more integers from 0 to 2^31 - 1, such as token ids, is an `Int32Array`.
   * @default false: it is a list
   */
  readonly int32Lists?: boolean | undefined;
}

const DEFAULT_MAX_VALUES = 2_000_000;

/** Default limits: enough for 100,000 regions. A large model's handshake is about 100 KB. */
export const MSGPACK_LIMITS: MsgpackLimits = {
  maxBytes: 32 * 2 ** 20,
  maxDepth: 16,
  maxItems: 200_000,
  maxValues: DEFAULT_MAX_VALUES,
};

/**
 * A number that msgpack writes as a float64 even when whole, as Python's msgspec demands of a
 * clock.
 */
export class Float64 {
  constructor(readonly value: number) {}
}

/** The library would silently write these as an empty map or a map of private fields. */
const plainDataOnly = new ExtensionCodec();
plainDataOnly.tryToEncode = (value: unknown) => {
  if (![Float64, Map, Set, Date].some((type) => value instanceof type)) return null;
  throw new KvError(
    "KV_INTERNAL",
    `msgpack: a ${value?.constructor.name} inside a message cannot be encoded`,
  );
};

const encoder = new Encoder({ ignoreUndefined: true, extensionCodec: plainDataOnly });

/**
 * Encodes a value to the bytes of Python's msgspec: shortest integers (uint64 above 2^32), map
 * entries in insertion order without undefined ones. A `Float64` may only be the whole value.
 * Integers beyond 2^53 would become floats.
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
 * Decodes one whole message; `what` names it in errors. Integers and floats become numbers. Bytes
 * are copies: views would keep the message alive.
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

export function atOnce<T>(steps: Iterator<unknown, T>): T {
  let next = steps.next();
  while (next.done !== true) next = steps.next();
  return next.value;
}

/** Decoded in one step, in about 30 microseconds. */
const STEP_VALUES = 1000;

const STEP_INTEGERS = 4000;
/** A shorter list stays a list. */
const LONG_LIST = 1000;

interface Container {
  readonly value: unknown[] | Record<string, unknown>;
  key: string | undefined;
  readonly items: number;
  left: number;
}

/**
 * As `decodeMsgpack`, in steps: the caller can serve others between them. Lists take memory only
 * for values that the message can have, as few bytes can announce 2^32.
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
    // V8 would copy a growing list again and again, so it gets room for all elements that the
    // message can have.
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

  /** Undefined, with nothing consumed, unless all elements are integers from 0 to 2^31 - 1. */
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

/** Counts UTF-16 units, where the caller sets no smaller limit. */
const MAX_STRING_LENGTH = 4096;

export interface MapFieldsOptions {
  /** The message's name in errors, such as "agent metadata". */
  readonly what: string;
  /** Limit of each list. */
  readonly maxItems: number;
  /** Error for a field of the wrong form. Default `KV_WIRE_MALFORMED`. */
  readonly malformedCode?: "KV_WIRE_MALFORMED" | "KV_REQUEST_INVALID" | undefined;
}

export function isMap(value: unknown): value is Readonly<Record<string, unknown>> {
  return (
    typeof value === "object" &&
    value !== null &&
    !Array.isArray(value) &&
    !(value instanceof Uint8Array)
  );
}

/**
 * Errors name field and value: `malformedCode` for a wrong form, `KV_WIRE_LIMIT_EXCEEDED` for too
 * many items or too long a string.
 */
export class MapFields {
  readonly #fields: Readonly<Record<string, unknown>>;
  readonly #options: MapFieldsOptions;
  readonly #read = new Set<string>();

  /** @throws `malformedCode` when `value` is not a map. */
  constructor(value: unknown, options: MapFieldsOptions) {
    this.#options = options;
    if (!isMap(value)) throw this.malformed("the message", "a map", value);
    this.#fields = value;
  }

  raw(name: string): unknown {
    this.#read.add(name);
    return Object.hasOwn(this.#fields, name) ? this.#fields[name] : undefined;
  }

  /** Lengths are in UTF-16 units; `maxLength` defaults to 4096. */
  string(name: string, { minLength = 0, maxLength = MAX_STRING_LENGTH } = {}): string {
    return this.#string(this.raw(name), name, minLength, maxLength);
  }

  /** `fallback` stands in for an absent or null field. */
  integer(
    name: string,
    {
      min = 0,
      max = Number.MAX_SAFE_INTEGER,
      fallback,
    }: { min?: number; max?: number; fallback?: number } = {},
  ): number {
    const found = this.raw(name) ?? fallback;
    if (typeof found !== "number" || !Number.isSafeInteger(found) || found < min || found > max) {
      throw this.malformed(name, `an integer from ${min} to ${max}`, found);
    }
    return found;
  }

  optionalInteger(name: string, range: { min?: number; max?: number } = {}): number | undefined {
    const found = this.raw(name);
    return found === undefined || found === null ? undefined : this.integer(name, range);
  }

  bytes(name: string): Uint8Array {
    const found = this.raw(name);
    if (!(found instanceof Uint8Array)) throw this.malformed(name, "bytes", found);
    return found;
  }

  integers(name: string, { min = 0 } = {}): readonly number[] | undefined {
    const list = this.#list(name);
    if (list === undefined) return undefined;
    return list.map((item, i) => {
      if (typeof item === "number" && Number.isSafeInteger(item) && item >= min) return item;
      throw this.malformed(`${name}[${i}]`, `an integer of at least ${min}`, item);
    });
  }

  strings(name: string): readonly string[] | undefined {
    return this.#list(name)?.map((item, i) =>
      this.#string(item, `${name}[${i}]`, 0, MAX_STRING_LENGTH),
    );
  }

  blockIds(
    name: string,
    { minPerGroup = 0, maxPerGroup = Number.MAX_SAFE_INTEGER } = {},
  ): BlockIds {
    const groups = this.#list(name);
    if (groups === undefined)
      throw this.malformed(name, "a list of block ids per KV cache group", groups);
    return groups.map((group, i) => {
      const field = `${name}[${i}]`;
      if (!Array.isArray(group) || group.length < minPerGroup)
        throw this.malformed(field, `a list of at least ${minPerGroup} block ids`, group);
      if (group.length > maxPerGroup)
        throw this.#tooMany(field, `${group.length} block ids`, maxPerGroup);
      // An iterator takes several times as long.
      for (let at = 0; at < group.length; at += 1) {
        const id: unknown = group[at];
        if (typeof id !== "number" || !Number.isSafeInteger(id) || id < 0)
          throw this.malformed(field, "a list of block ids", id);
      }
      return group as readonly number[];
    });
  }

  /** Unread fields, with which a message encodes to the same bytes again. */
  rest(): Readonly<Record<string, unknown>> {
    return Object.fromEntries(
      Object.entries(this.#fields).filter(([name]) => !this.#read.has(name)),
    );
  }

  malformed(name: string, wanted: string, found: unknown): KvError {
    return malformed(this.#options.what, name, wanted, found, this.#options.malformedCode);
  }

  #string(found: unknown, name: string, minLength: number, maxLength: number): string {
    if (typeof found !== "string" || found.length < minLength)
      throw this.malformed(name, minLength === 0 ? "a string" : "a non-empty string", found);
    if (found.length > maxLength)
      throw this.#tooMany(name, `${found.length} characters`, maxLength);
    return found;
  }

  #list(name: string): readonly unknown[] | undefined {
    const found = this.raw(name);
    if (found === undefined || found === null) return undefined;
    if (!Array.isArray(found)) throw this.malformed(name, "a list", found);
    const { maxItems } = this.#options;
    if (found.length > maxItems) throw this.#tooMany(name, `${found.length} items`, maxItems);
    return found;
  }

  #tooMany(name: string, found: string, limit: number): KvError {
    const { what, malformedCode } = this.#options;
    const code = malformedCode === "KV_REQUEST_INVALID" ? malformedCode : "KV_WIRE_LIMIT_EXCEEDED";
    return new KvError(code, `${what}: ${name} has ${found}; the limit is ${limit}`, {
      details: { field: name, limit },
    });
  }
}

/**
 * Formats a peer's value for an error message: in few characters, even for megabytes, cycles, a
 * bigint, or a key named `toString`.
 */
export function formatValue(value: unknown): string {
  if (value === undefined) return "missing";
  if (value instanceof Uint8Array) return `${value.byteLength} bytes`;
  if (Array.isArray(value))
    return value.length === 0 ? "an empty list" : `a list of ${value.length}`;
  if (typeof value === "string")
    return JSON.stringify(value.length > 80 ? `${value.slice(0, 80)}…` : value);
  if (typeof value !== "object" || value === null) return String(value);
  const keys = Object.keys(value);
  const more = keys.length > 4 ? ", …" : "";
  return `a map {${keys
    .slice(0, 4)
    .map((key) => key.slice(0, 20))
    .join(", ")}${more}}`;
}

export function defined<T extends object>(map: T): T {
  return Object.fromEntries(Object.entries(map).filter(([, value]) => value !== undefined)) as T;
}

export function malformed(
  what: string,
  name: string,
  wanted: string,
  found: unknown,
  code: KvError["code"] = "KV_WIRE_MALFORMED",
): KvError {
  return new KvError(code, `${what}: ${name} is ${formatValue(found)}, not ${wanted}`, {
    details: { field: name, key: name, wanted, found: formatValue(found) },
  });
}
