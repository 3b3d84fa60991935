import { KvError } from "@kv/interface";
import { DECIDING_FIELDS, OTHER_FIELDS } from "./deciding-fields.js";

const MAX_COUNT = 2 ** 31;
const MAX_LAYERS = 10_000;

/**
 * Fields of a `config.json`, as a family of models reads them. `refuseUnread` refuses unread fields
 * that may decide a cache, so that none is silently ignored.
 */
export class ConfigFields {
  readonly #model: string;
  readonly #values: Readonly<Record<string, unknown>>;
  readonly #path: string;
  readonly #read = new Set<string>();

  /** `path`: place of the fields in the file, ending with a dot, or "". */
  constructor(model: string, values: Readonly<Record<string, unknown>>, path = "") {
    this.#model = model;
    this.#values = values;
    this.#path = path;
  }

  /** Returns undefined for a missing or null field. */
  value(name: string): unknown {
    this.#read.add(name);
    return this.#values[name] ?? undefined;
  }

  /**
   * A value as the table of architectures keeps it: "null" for an explicit null, null where the
   * field is missing, the different values of a list.
   */
  kindOf(name: string): unknown {
    const value = this.value(name);
    if (value === undefined) return Object.hasOwn(this.#values, name) ? "null" : null;
    return Array.isArray(value) ? [...new Set(value)].sort() : value;
  }

  has(name: string): boolean {
    return this.value(name) !== undefined;
  }

  /** Marks fields without effect on this family's caches as read. */
  ignore(...names: readonly string[]): void {
    for (const name of names) this.#read.add(name);
  }

  /**
   * The whole number of the first of these names that has a value.
   * @throws `KV_CONFIG_INVALID` for another value.
   */
  optionalCount(...names: readonly string[]): number | undefined {
    let found: number | undefined;
    for (const name of names) {
      const value = this.value(name);
      if (value === undefined) continue;
      if (
        typeof value !== "number" ||
        !Number.isSafeInteger(value) ||
        value < 0 ||
        value > MAX_COUNT
      )
        throw this.#invalid(name, value, "a whole number");
      found ??= value;
    }
    return found;
  }

  /**
   * As `optionalCount`, but above 0. `otherwise`: the value that vLLM takes.
   * @throws `KV_CONFIG_INVALID`; `KV_PLAN_UNSUPPORTED` where there is none.
   */
  count(names: string | readonly string[], otherwise?: number): number {
    const all = typeof names === "string" ? [names] : names;
    const found = this.optionalCount(...all) ?? otherwise;
    if (found === undefined)
      throw new KvError(
        "KV_PLAN_UNSUPPORTED",
        `${this.#model}: ${this.#path}${all.join(" or ")} is missing`,
        { hint: "give the config.json of a decoder model from Hugging Face" },
      );
    if (found === 0) throw this.#invalid(all[0] ?? "", 0, "above 0");
    return found;
  }

  /** @throws The errors of `count`. */
  layers(names: string | readonly string[]): number {
    const found = this.count(names);
    if (found <= MAX_LAYERS) return found;
    throw this.#invalid(String(names), found, `at most ${MAX_LAYERS} layers`);
  }

  /** @throws `KV_CONFIG_INVALID`. */
  number(name: string, otherwise: number): number {
    const value = this.value(name) ?? otherwise;
    if (typeof value === "number" && Number.isFinite(value) && value > 0) return value;
    throw this.#invalid(name, value, "a number above 0");
  }

  text(name: string): string | undefined {
    const value = this.value(name);
    if (value === undefined || typeof value === "string") return value;
    throw this.#invalid(name, value, "a text");
  }

  flag(name: string, otherwise: boolean): boolean {
    const value = this.value(name) ?? otherwise;
    if (typeof value === "boolean") return value;
    throw this.#invalid(name, value, "true or false");
  }

  /**
   * One value per layer; undefined where the field is missing.
   * @throws `KV_CONFIG_INVALID` for a shorter list.
   */
  perLayer<T extends string | number>(
    name: string,
    type: T extends string ? "string" : "number",
    layers: number,
  ): readonly T[] | undefined {
    const value = this.value(name);
    if (value === undefined || (Array.isArray(value) && value.length === 0)) return undefined;
    if (!Array.isArray(value) || value.some((each) => typeof each !== type))
      throw this.#invalid(name, value, `a list of ${type}s`);
    if (value.length < layers)
      throw this.#invalid(
        name,
        `${value.length} entries`,
        `as long as the model's ${layers} layers`,
      );
    return value as T[];
  }

  /** Returns undefined where the field is missing. */
  object(name: string): ConfigFields | undefined {
    const value = this.value(name);
    if (value === undefined) return undefined;
    if (!isRecord(value)) throw this.#invalid(name, value, "an object");
    return new ConfigFields(this.#model, value, `${this.#path}${name}.`);
  }

  unknownValue(name: string, value: unknown, known: string): KvError {
    return new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${this.#model}: ${this.#path}${name} is ${shown(value)}; ${known}`,
      { hint: OTHER_WAYS },
    );
  }

  /** @throws `KV_PLAN_UNSUPPORTED` for unread fields that may decide a cache. */
  refuseUnread(family: string): void {
    const unread = Object.entries(this.#values).filter(
      ([name, value]) => decides(name, value) && !this.#read.has(name),
    );
    if (unread.length === 0) return;
    const names = unread
      .map(([name, value]) => `${this.#path}${name} (${shown(value)})`)
      .join(", ");
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${this.#model}: ${names}: ${unread.length === 1 ? "a field" : "fields"} that may decide the KV cache, which the rules for ${family} do not know`,
      { hint: OTHER_WAYS, details: { fields: unread.map(([name]) => name) } },
    );
  }

  #invalid(name: string, value: unknown, wanted: string): KvError {
    return new KvError(
      "KV_CONFIG_INVALID",
      `${this.#model}: ${this.#path}${name} is ${shown(value)}, not ${wanted}`,
      { hint: "give the config.json of a decoder model from Hugging Face" },
    );
  }
}

export const OTHER_WAYS =
  "describe the regions in a file (--file), ask two running engines (kv-peer plan), or ask an installed vLLM for its caches (tools/vllm/cache_specs.py)";

/** Null, false, 0 and empty values turn a field off. */
function decides(name: string, value: unknown): boolean {
  if (value === null || value === undefined || value === false || value === 0) return false;
  if (typeof value === "object" && Object.keys(value).length === 0) return false;
  return !OTHER_FIELDS.has(name) && DECIDING_FIELDS.some((pattern) => pattern.test(name));
}

export function isRecord(value: unknown): value is Readonly<Record<string, unknown>> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function shown(value: unknown): string {
  const text = JSON.stringify(value) ?? String(value);
  return text.length > 60 ? `${text.slice(0, 60)}…` : text;
}

/** Texts, and Python's numbers that JSON lacks. */
const TEXT_OR_SPECIAL = /"(?:[^"\\]|\\.)*"|-?\bInfinity\b|\bNaN\b/g;

/**
 * Reads Python's JSON: `Infinity`, `-Infinity` and `NaN` become null.
 * @throws `SyntaxError`.
 */
export function parsePythonJson(text: string): unknown {
  try {
    return JSON.parse(text) as unknown;
  } catch (error) {
    const replaced = text.replace(TEXT_OR_SPECIAL, (found) =>
      found.startsWith('"') ? found : "null",
    );
    if (replaced === text) throw error;
    return JSON.parse(replaced) as unknown;
  }
}
