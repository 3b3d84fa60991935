import { KvError } from "@kv/interface";
import { show } from "./show.js";

/** Longest string that a field may hold, but for those that say otherwise. */
const MAX_TEXT_LENGTH = 4096;

/** A decoded map whose fields are taken one by one, each checked and named in the error. What is not taken stays in `rest`. */
export interface Fields {
  text(name: string, fallback?: string): string;
  integer(name: string, range?: { min?: number; max?: number; fallback?: number }): number;
  bytes(name: string): Uint8Array;
  /** `undefined` when absent or null. */
  integers(name: string, range?: { min?: number }): readonly number[] | undefined;
  texts(name: string): readonly string[] | undefined;
  raw(name: string): unknown;
  rest(): Readonly<Record<string, unknown>>;
}

export function fieldsOf(value: unknown, what: string, maxItems: number): Fields {
  if (typeof value !== "object" || value === null || Array.isArray(value) || value instanceof Uint8Array) {
    throw malformed(what, "the message", "a map", value);
  }
  const given = value as Record<string, unknown>;
  const taken = new Set<string>();
  const take = (name: string) => {
    taken.add(name);
    return Object.hasOwn(given, name) ? given[name] : undefined;
  };
  const list = (name: string): readonly unknown[] | undefined => {
    const found = take(name);
    if (found === undefined || found === null) return undefined;
    if (!Array.isArray(found)) throw malformed(what, name, "a list", found);
    if (found.length > maxItems) {
      throw new KvError(
        "KV_WIRE_LIMIT_EXCEEDED",
        `${what}: ${name} has ${found.length} items, at most ${maxItems} are taken`,
        { details: { field: name, limit: maxItems } },
      );
    }
    return found;
  };
  return {
    text(name, fallback) {
      const found = take(name) ?? fallback;
      return textOf(found, what, name);
    },
    integer(name, { min = 0, max = Number.MAX_SAFE_INTEGER, fallback } = {}) {
      const found = take(name) ?? fallback;
      if (typeof found !== "number" || !Number.isSafeInteger(found) || found < min || found > max) {
        throw malformed(what, name, `an integer from ${min} to ${max}`, found);
      }
      return found;
    },
    bytes(name) {
      const found = take(name);
      if (!(found instanceof Uint8Array)) throw malformed(what, name, "bytes", found);
      return found;
    },
    integers(name, { min = 0 } = {}) {
      return list(name)?.map((item, i) => {
        if (typeof item !== "number" || !Number.isSafeInteger(item) || item < min) {
          throw malformed(what, `${name}[${i}]`, `an integer of at least ${min}`, item);
        }
        return item;
      });
    },
    texts(name) {
      return list(name)?.map((item, i) => textOf(item, what, `${name}[${i}]`));
    },
    raw: take,
    rest: () => Object.fromEntries(Object.entries(given).filter(([name]) => !taken.has(name))),
  };
}

function textOf(found: unknown, what: string, name: string): string {
  if (typeof found !== "string") throw malformed(what, name, "a string", found);
  if (found.length <= MAX_TEXT_LENGTH) return found;
  throw new KvError(
    "KV_WIRE_LIMIT_EXCEEDED",
    `${what}: ${name} has ${found.length} characters, at most ${MAX_TEXT_LENGTH} are taken`,
    { details: { field: name, limit: MAX_TEXT_LENGTH } },
  );
}

export function malformed(what: string, name: string, wanted: string, found: unknown): KvError {
  return new KvError("KV_WIRE_MALFORMED", `${what}: ${name} is ${show(found)}, not ${wanted}`, {
    details: { field: name, wanted, found: show(found) },
  });
}
