import { type BlockIds, KvError } from "@kv/interface";
import { formatValue } from "./format-value.js";

/**
 * Longest string that a field may hold, in UTF-16 units, where the caller sets no smaller limit.
 */
const MAX_STRING_LENGTH = 4096;

/** How `MapFields` names a message in errors, and how much of it is accepted. */
export interface MapFieldsOptions {
  /** The message's name in errors, such as "agent metadata". */
  readonly what: string;
  /** Most items that one list may have. */
  readonly maxItems: number;
  /** Code of the error for a field of the wrong form. Default `KV_WIRE_MALFORMED`. */
  readonly malformedCode?: "KV_WIRE_MALFORMED" | "KV_REQUEST_INVALID" | undefined;
}

/**
 * Whether the value is a map as msgpack and JSON give one: an object that is neither a list nor
 * bytes.
 */
export function isMap(value: unknown): value is Readonly<Record<string, unknown>> {
  return (
    typeof value === "object" &&
    value !== null &&
    !Array.isArray(value) &&
    !(value instanceof Uint8Array)
  );
}

/**
 * Reads the fields of a peer's map one by one. Each read checks the value and names field and value
 * in its error: `malformedCode` for a wrong form, `KV_WIRE_LIMIT_EXCEEDED` for too many items or
 * too long a string. Unread fields stay in `rest()`.
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

  /** A string of `minLength` (default 0) to `maxLength` (default 4096) UTF-16 units. */
  string(name: string, { minLength = 0, maxLength = MAX_STRING_LENGTH } = {}): string {
    return this.#string(this.raw(name), name, minLength, maxLength);
  }

  /**
   * An integer from `min` (default 0) to `max`; `fallback` stands in for an absent or null field.
   */
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

  /**
   * A list of integers of at least `min` (default 0); undefined when the field is absent or null.
   */
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

  /**
   * Block ids: a list per KV cache group, each of integers of at least 0, each group with at least
   * `minPerGroup` ids (default 0).
   */
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
      // By its position: an iterator takes several times as long, and there may be a million ids.
      for (let at = 0; at < group.length; at += 1) {
        const id: unknown = group[at];
        if (typeof id !== "number" || !Number.isSafeInteger(id) || id < 0)
          throw this.malformed(field, "a list of block ids", id);
      }
      return group as readonly number[];
    });
  }

  /**
   * Fields that were not read, so that a message with unknown fields encodes to the same bytes
   * again.
   */
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
 * The error for a part of a peer's message that has the wrong form. `code` is `KV_WIRE_MALFORMED`
 * by default.
 */
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
