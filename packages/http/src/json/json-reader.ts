import { KvError } from "@kv/interface";

export const QUOTE = 0x22;
export const COMMA = 0x2c;
export const COLON = 0x3a;
export const BACKSLASH = 0x5c;
export const OPEN_LIST = 0x5b;
export const CLOSE_LIST = 0x5d;
export const OPEN_OBJECT = 0x7b;
const CLOSE_OBJECT = 0x7d;

/**
 * Finds the brackets, commas, colons and quotes of a JSON text in pieces. It does not check that
 * the text is JSON.
 */
export class JsonReader {
  /** The character that was found last. */
  token = 0;
  /** Objects and lists that are open after it. */
  depth = 0;
  /** Whether it opens a string. */
  inString = false;
  #escaped = false;

  /**
   * Position of the next bracket, comma, colon or quote outside strings; -1 if this piece has none.
   */
  next(text: string | Uint8Array, from: number): number {
    if (this.inString) return this.#endOfString(text, from);
    for (let at = from; at < text.length; at += 1) {
      const code = codeAt(text, at) as number;
      // Most characters outside strings are digits.
      if (code >= 0x30 && code < COLON) continue;
      if (code === QUOTE) this.inString = true;
      else if (code === OPEN_LIST || code === OPEN_OBJECT) this.depth += 1;
      else if (code === CLOSE_LIST || code === CLOSE_OBJECT) this.depth -= 1;
      else if (code !== COMMA && code !== COLON) continue;
      this.token = code;
      return at;
    }
    return -1;
  }

  /** `indexOf` is fast on long strings, such as base64 images. */
  #endOfString(text: string | Uint8Array, from: number): number {
    if (from >= text.length) return -1;
    let at = this.#escaped ? from + 1 : from;
    for (;;) {
      const quote = typeof text === "string" ? text.indexOf('"', at) : text.indexOf(QUOTE, at);
      const end = quote === -1 ? text.length : quote;
      let slashes = 0;
      while (end - slashes > at && codeAt(text, end - slashes - 1) === BACKSLASH) slashes += 1;
      const isEscaped = slashes % 2 === 1;
      this.#escaped = quote === -1 && isEscaped;
      this.inString = quote === -1 || isEscaped;
      if (!this.inString || quote === -1) return quote;
      at = quote + 1;
    }
  }
}

const codeAt = (text: string | Uint8Array, at: number) =>
  typeof text === "string" ? text.charCodeAt(at) : text[at];

/** Limits of a JSON text, for the time of its parse and the memory of its values. */
export interface JsonLimits {
  /** Nesting of objects and lists. */
  readonly bodyDepth: number;
  /** Members of all objects, plus all objects and lists. */
  readonly bodyMembers: number;
  /** Elements of all lists and members of all objects. */
  readonly bodyValues: number;
}

/**
 * Members of the outermost object. vLLM's requests have about 80, and each part of a split request
 * repeats them.
 */
export const TOP_LEVEL_MEMBERS = 1_000;

/** Counts a JSON text's values as its bytes come. It does not check that the text is JSON. */
export class JsonScan {
  readonly #reader = new JsonReader();
  #members = 0;
  #topLevel = 0;
  #values = 0;

  constructor(private readonly limits: JsonLimits) {}

  /** @throws `KV_REQUEST_INVALID` above a limit. */
  push(bytes: Uint8Array): void {
    const { bodyDepth, bodyMembers, bodyValues } = this.limits;
    const reader = this.#reader;
    for (let at = reader.next(bytes, 0); at !== -1; at = reader.next(bytes, at + 1)) {
      switch (reader.token) {
        case COMMA:
          this.#values += 1;
          if (this.#values > bodyValues) throw above("limits.bodyValues", bodyValues, "values");
          break;
        case OPEN_LIST:
        case OPEN_OBJECT:
          if (reader.depth > bodyDepth)
            throw above("limits.bodyDepth", bodyDepth, "levels of objects and lists");
          this.#member(bodyMembers);
          break;
        case COLON:
          this.#member(bodyMembers);
          if (reader.depth === 1) this.#topLevel += 1;
          if (this.#topLevel > TOP_LEVEL_MEMBERS)
            throw above(undefined, TOP_LEVEL_MEMBERS, "top-level members");
          break;
      }
    }
  }

  #member(most: number): void {
    this.#members += 1;
    if (this.#members > most) throw above("limits.bodyMembers", most, "members and lists");
  }
}

function above(limit: string | undefined, count: number, what: string): KvError {
  return new KvError("KV_REQUEST_INVALID", `the body has more than ${count} ${what}`, {
    hint: limit === undefined ? "send fewer" : `send fewer, or raise ${limit}`,
    details: { limit: limit ?? "top-level members" },
  });
}

const END_OF_LITERAL = /[\s,\]}]/g;

/** Finds the end of a JSON value whose text may come in pieces. */
export class JsonValueEnd {
  readonly #reader = new JsonReader();
  #isLiteral: boolean | undefined;

  /** Position after the value; -1 if this piece does not end it. */
  find(text: string, from: number): number {
    this.#isLiteral ??= !/["[{]/.test(text[from] ?? "");
    if (this.#isLiteral) {
      END_OF_LITERAL.lastIndex = from;
      return END_OF_LITERAL.exec(text)?.index ?? -1;
    }
    const reader = this.#reader;
    for (let at = reader.next(text, from); at !== -1; at = reader.next(text, at + 1))
      if (reader.depth === 0 && !reader.inString) return at + 1;
    return -1;
  }
}

/** Positions of a member in the text of its object. */
export interface JsonMember {
  readonly key: string;
  /** Of the key's opening quote. */
  readonly start: number;
  /** After the colon. */
  readonly valueStart: number;
  /** Of the comma or bracket after the value. */
  readonly end: number;
}

/** `text` must be an object that `JSON.parse` accepts. */
export function topLevelMembers(text: string): JsonMember[] {
  const members: JsonMember[] = [];
  const reader = new JsonReader();
  let stringStart = 0;
  let start = 0;
  let valueStart = 0;
  for (let at = reader.next(text, 0); at !== -1; at = reader.next(text, at + 1)) {
    if (reader.depth > 1) continue;
    if (reader.inString) stringStart = at;
    else if (reader.token === COLON) {
      start = stringStart;
      valueStart = at + 1;
    } else if (valueStart > 0 && (reader.token === COMMA || reader.depth === 0)) {
      const key = keyOf(text.slice(start, valueStart - 1).trimEnd());
      members.push({ key, start, valueStart, end: at });
    }
  }
  return members;
}

/** Keys rarely have escapes, and a slice costs less than a parse. */
function keyOf(written: string): string {
  return written.includes("\\") ? (JSON.parse(written) as string) : written.slice(1, -1);
}

/**
 * A member's value as text; undefined without one. Of duplicates the last counts, as in
 * `JSON.parse`.
 */
export function rawMember(text: string, key: string): string | undefined {
  const member = topLevelMembers(text).findLast((candidate) => candidate.key === key);
  return member && text.slice(member.valueStart, member.end).trim();
}

/** Changes of an object's members. */
export interface MemberEdits {
  readonly remove?: readonly string[] | undefined;
  /** Values as JSON text, written after the members that stay. */
  readonly set?: Readonly<Record<string, string>> | undefined;
}

/** Edits members of a JSON object as text. The others keep integers beyond 2^53. */
export function editMembers(text: string, { remove = [], set = {} }: MemberEdits): string {
  let members = "";
  for (const { key, start, end } of topLevelMembers(text)) {
    if (remove.includes(key) || Object.hasOwn(set, key)) continue;
    members += `${members === "" ? "" : ","}${text.slice(start, end).trimEnd()}`;
  }
  for (const key in set)
    members += `${members === "" ? "" : ","}${JSON.stringify(key)}:${set[key]}`;
  return `{${members}}`;
}

/** How often a name is a key in a JSON text, at any depth. */
export function timesNamed(text: string, name: string): number {
  const reader = new JsonReader();
  let stringStart = 0;
  let times = 0;
  for (let at = reader.next(text, 0); at !== -1; at = reader.next(text, at + 1)) {
    if (reader.inString) stringStart = at;
    else if (reader.token === COLON && keyOf(text.slice(stringStart, at).trimEnd()) === name)
      times += 1;
  }
  return times;
}

/** Returns the elements of a valid JSON list, without copies. Yields after each piece. */
export function* listElements(
  list: Uint8Array,
  pieceBytes: number,
): Generator<undefined, Uint8Array[]> {
  const elements: Uint8Array[] = [];
  const reader = new JsonReader();
  let start = 1;
  for (let from = 0; from < list.length; from += pieceBytes) {
    const piece = list.subarray(from, from + pieceBytes);
    for (let found = reader.next(piece, 0); found !== -1; found = reader.next(piece, found + 1)) {
      const isComma = reader.depth === 1 && reader.token === COMMA;
      if (!isComma && reader.depth > 0) continue;
      elements.push(list.subarray(start, from + found));
      start = from + found + 1;
    }
    yield;
  }
  return elements;
}

/** Replaces a part of a text. */
export interface TextEdit {
  readonly start: number;
  readonly end: number;
  readonly text: string;
}

/** Edits `text`, which begins at position `at` of the whole. */
export function editText(text: string, edits: readonly TextEdit[], at = 0): string {
  let edited = "";
  let from = 0;
  for (const edit of edits) {
    const [start, end] = [edit.start - at, edit.end - at];
    if (end < 0 || start > text.length) continue;
    edited += text.slice(from, Math.max(from, start));
    from = Math.min(end, text.length);
    if (end <= text.length) edited += edit.text;
  }
  return edited + text.slice(from);
}

/** Whether a parsed value is an object, and no list. */
export function isObject(value: unknown): value is Readonly<Record<string, unknown>> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** A `Buffer` over the same memory. */
export function asBuffer(bytes: Uint8Array): Buffer {
  return Buffer.isBuffer(bytes)
    ? bytes
    : Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}
