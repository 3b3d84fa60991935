import type { YieldingQueue } from "@kv/interface";
import { KvError } from "@kv/interface";
import {
  asBuffer,
  BACKSLASH,
  COLON,
  COMMA,
  JsonReader,
  OPEN_LIST,
  OPEN_OBJECT,
  QUOTE,
} from "./json-reader.js";

/** Longer bodies are read and parsed in steps, between those of others. */
export const AT_ONCE_BYTES = 64 * 1024;
/** Token ids of this length take half a millisecond. */
const PIECE_BYTES = 64 * 1024;
const LONG_MEMBER_BYTES = 4 * 1024;

/** A member of the outermost object above `longMemberBytes`. */
export interface LongMember {
  readonly key: string;
  /** Its value as written. */
  readonly value: Uint8Array;
}

/** A JSON text that was parsed in pieces. */
export interface ParsedPieces {
  readonly value: unknown;
  /** The outermost object without its long members; else empty. */
  readonly text: string;
  /** The long members of the outermost object. `text` repeats none of them after its place. */
  readonly long: readonly LongMember[];
  /** Members of the outermost object in two pieces. */
  readonly repeated: ReadonlySet<string>;
}

export interface PieceOptions {
  /**
   * A member of the outermost object with lists of token ids. A long list of whole numbers of at
   * most 9 digits becomes an `Int32Array`. @default none
   */
  readonly idsMember?: string | undefined;
  /** Bytes to parse at once. @default 64 KiB */
  readonly pieceBytes?: number | undefined;
  /** Longer members of the outermost object go to `long`. @default 4 KiB */
  readonly longMemberBytes?: number | undefined;
}

/**
 * Parses JSON like `JSON.parse`, and yields between pieces. It cuts lists, objects and strings at
 * any depth. Throws for what is not JSON. A `JsonScan` must have limited depth and members.
 */
export function* parseJsonPieces(
  given: Uint8Array,
  { idsMember, pieceBytes = PIECE_BYTES, longMemberBytes = LONG_MEMBER_BYTES }: PieceOptions = {},
): Generator<undefined, ParsedPieces> {
  const bytes = asBuffer(given);
  const begin = bytes.toString("latin1", 0, BOM.length) === BOM ? BOM.length : 0;
  const values = new LongValues(begin, pieceBytes, longMemberBytes);
  for (let from = begin; from < bytes.length; from += pieceBytes) {
    values.push(bytes.subarray(from, from + pieceBytes), from);
    yield;
  }
  const document = values.end(bytes.length);
  return yield* new Pieces(bytes, pieceBytes, idsMember).parse(document);
}

/** @throws `KV_REQUEST_INVALID` for what is not JSON. */
export async function parseBody(bytes: Uint8Array, parses: YieldingQueue): Promise<unknown> {
  const pieces = parseJsonPieces(bytes);
  try {
    if (bytes.length > AT_ONCE_BYTES) return (await parses.run(pieces)).value;
    let step = pieces.next();
    while (step.done !== true) step = pieces.next();
    return step.value.value;
  } catch {
    throw new KvError("KV_REQUEST_INVALID", "the body is not JSON");
  }
}

/** A list, object or string that is too long to parse at once. */
interface LongValue {
  readonly start: number;
  end: number;
  readonly elementStart: number;
  commas: number;
  /** The commas between groups of elements. A long value is alone in its group. */
  readonly cuts: number[];
  readonly inner: LongValue[];
}

interface OpenValue extends LongValue {
  /** Where its current element or member begins. */
  current: number;
  /** The next comma after this position is a cut. */
  cutFrom: number;
}

class LongValues {
  readonly #reader = new JsonReader();
  /** The enclosing containers. The first stands for the whole text, as a list. */
  readonly #outer: OpenValue[] = [];
  #innermost: OpenValue;
  #quote = 0;

  constructor(
    from: number,
    private readonly pieceBytes: number,
    private readonly longMemberBytes: number,
  ) {
    this.#innermost = this.#begin(from - 1, from);
  }

  push(bytes: Buffer, from: number): void {
    const reader = this.#reader;
    for (let found = reader.next(bytes, 0); found !== -1; found = reader.next(bytes, found + 1)) {
      const at = from + found;
      const innermost = this.#innermost;
      switch (reader.token) {
        case COMMA:
          innermost.commas += 1;
          innermost.current = at + 1;
          if (at < innermost.cutFrom) break;
          innermost.cuts.push(at);
          innermost.cutFrom = at + this.pieceBytes;
          break;
        case QUOTE:
          if (reader.inString) this.#quote = at;
          else if (at >= this.#quote + this.#shortestLong())
            this.#endLong(this.#begin(this.#quote, innermost.current), at);
          break;
        case COLON:
          // The string before it is a key.
          if (innermost.inner.at(-1)?.start === this.#quote) innermost.inner.pop();
          break;
        case OPEN_LIST:
        case OPEN_OBJECT:
          this.#outer.push(innermost);
          this.#innermost = this.#begin(at, innermost.current);
          break;
        default: {
          const outer = this.#outer.pop();
          if (outer === undefined) throw new SyntaxError("a bracket is not opened");
          this.#innermost = outer;
          if (at >= innermost.start + this.#shortestLong()) this.#endLong(innermost, at);
        }
      }
    }
  }

  /** Returns the whole text as a list of one element. */
  end(lengthBytes: number): LongValue {
    if (this.#outer.length > 0 || this.#reader.inString)
      throw new SyntaxError("the text ends early");
    this.#innermost.end = lengthBytes + 1;
    return this.#innermost;
  }

  /** The whole text is always long. */
  #shortestLong(): number {
    return [0, this.longMemberBytes][this.#outer.length] ?? this.pieceBytes;
  }

  #begin(start: number, elementStart: number): OpenValue {
    const current = start + 1;
    return {
      start,
      end: 0,
      elementStart,
      commas: 0,
      cuts: [],
      inner: [],
      current,
      cutFrom: current + this.pieceBytes,
    };
  }

  #endLong(value: OpenValue, at: number): void {
    value.end = at + 1;
    this.#innermost.inner.push(value);
    this.#innermost.cutFrom = 0;
  }
}

const BOM = "\u00ef\u00bb\u00bf";
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** List elements or object members: a long value and its key, or several others. */
interface Group {
  readonly from: number;
  readonly end: number;
  readonly long?: LongValue;
}

class Pieces {
  readonly #shortMembers: string[] = [];
  readonly #long = new Map<string, Uint8Array>();
  readonly #repeated = new Set<string>();

  constructor(
    private readonly bytes: Buffer,
    private readonly pieceBytes: number,
    private readonly idsMember: string | undefined,
  ) {}

  *parse(document: LongValue): Generator<undefined, ParsedPieces> {
    const list = yield* this.#list(document, 0, false);
    if (list.length !== 1) throw new SyntaxError("the text is not one value");
    return {
      value: list[0],
      text: `{${this.#shortMembers.join(",")}}`,
      long: Array.from(this.#long, ([key, value]) => ({ key, value })),
      repeated: this.#repeated,
    };
  }

  /** `depth` is 1 for the outermost value. `hasIds`: a list of token ids. */
  *#value(long: LongValue, depth: number, hasIds: boolean): Generator<undefined, unknown> {
    const first = this.bytes[long.start];
    if (first === QUOTE) return yield* this.#string(long);
    // In ASCII, } and ] come two after { and [.
    if (this.bytes[long.end - 1] !== (first as number) + 2)
      throw new SyntaxError("a bracket is of the other kind");
    if (first === OPEN_OBJECT) return yield* this.#object(long, depth);
    return (
      (hasIds ? yield* this.#ids(long) : undefined) ?? (yield* this.#list(long, depth, hasIds))
    );
  }

  *#list(list: LongValue, depth: number, hasIds: boolean): Generator<undefined, unknown[]> {
    // V8 would copy a growing list again and again.
    const value = new Array<unknown>(list.commas + 1);
    let count = 0;
    for (const { from, end, long } of this.#groups(list)) {
      if (long !== undefined) {
        if (!this.#isBlank(from, end)) throw new SyntaxError("two values without a comma");
        value[count++] = yield* this.#value(long, depth + 1, hasIds);
      } else {
        const elements = JSON.parse(`[${this.#text(from, end)}]`) as unknown[];
        if (elements.length === 0) throw new SyntaxError("an element is missing");
        for (const element of elements) value[count++] = element;
      }
      yield;
    }
    value.length = count;
    return value;
  }

  *#object(object: LongValue, depth: number): Generator<undefined, Record<string, unknown>> {
    const value: Record<string, unknown> = {};
    const isOutermost = depth === 1;
    const set = (key: string, member: unknown) => {
      if (isOutermost && Object.hasOwn(value, key)) this.#repeated.add(key);
      // `JSON.parse` treats `__proto__` as a key like any other.
      if (key !== "__proto__") value[key] = member;
      else
        Object.defineProperty(value, key, {
          value: member,
          configurable: true,
          enumerable: true,
          writable: true,
        });
    };
    for (const { from, end, long } of this.#groups(object)) {
      const text = this.#text(from, end);
      const members = JSON.parse(`{${text}${long === undefined ? "" : "[]"}}`) as object;
      const keys = Object.keys(members);
      const [key] = keys;
      if (key === undefined) throw new SyntaxError("a member is missing");
      if (long !== undefined) {
        set(key, yield* this.#value(long, depth + 1, isOutermost && key === this.idsMember));
        if (isOutermost) this.#long.set(key, this.bytes.subarray(long.start, long.end));
      } else {
        for (const [name, member] of Object.entries(members)) set(name, member);
        if (isOutermost) this.#shortMembers.push(text);
        if (isOutermost) for (const name of keys) this.#long.delete(name);
      }
      yield;
    }
    return value;
  }

  /** Undefined unless all are whole numbers of at most 9 digits. */
  *#ids(list: LongValue): Generator<undefined, Int32Array | undefined> {
    // V8 does not count shared memory. It would else collect all garbage after a few long bodies.
    const ids = new Int32Array(new SharedArrayBuffer(4 * (list.commas + 1)));
    let count = 0;
    for (const { from, end, long } of this.#groups(list)) {
      if (long !== undefined) return undefined;
      count = readIds(this.bytes.subarray(from, end), ids, count);
      if (count === 0) return undefined;
      yield;
    }
    return count === 0 ? undefined : ids;
  }

  *#string({ start, end }: LongValue): Generator<undefined, string> {
    let value = "";
    let from = start + 1;
    while (from < end - 1) {
      const to = this.#cutOfString(from, end - 1);
      value += JSON.parse(`"${this.#text(from, to)}"`) as string;
      from = to;
      yield;
    }
    return value;
  }

  /** Cuts a string outside its escapes and characters. */
  #cutOfString(from: number, end: number): number {
    const bytes = this.bytes;
    // An escape has at most 6 bytes, a character 4.
    const most = from + Math.max(16, this.pieceBytes);
    if (most >= end) return end;
    const slash = most - 5 + bytes.subarray(most - 5, most).lastIndexOf(BACKSLASH);
    let slashes = 0;
    while (slash - slashes >= from && bytes[slash - slashes] === BACKSLASH) slashes += 1;
    if (slashes % 2 === 1) return slash;
    let to = most;
    while (to > most - 4 && ((bytes[to] as number) & 0xc0) === 0x80) to -= 1;
    return to;
  }

  #groups({ start, end, commas, cuts, inner }: LongValue): Group[] {
    if (commas + inner.length === 0 && this.#isBlank(start + 1, end - 1)) return [];
    const groups: Group[] = [];
    let taken = 0;
    let from = start + 1;
    for (const groupEnd of [...cuts, end - 1]) {
      const long = inner[taken];
      if (long !== undefined && long.start < groupEnd) {
        taken += 1;
        if (long.elementStart > from) groups.push({ from, end: long.elementStart - 1 });
        if (!this.#isBlank(long.end, groupEnd)) throw new SyntaxError("two values without a comma");
        groups.push({ from: long.elementStart, end: long.start, long });
      } else groups.push({ from, end: groupEnd });
      from = groupEnd + 1;
    }
    return groups;
  }

  #isBlank(from: number, end: number): boolean {
    for (let at = from; at < end; at += 1) if (!isBlankByte(this.bytes[at])) return false;
    return true;
  }

  #text(from: number, end: number): string {
    return utf8.decode(this.bytes.subarray(from, end));
  }
}

/** More digits may exceed 32 bits, and all vocabularies. */
const MOST_BEFORE_LAST_DIGIT = 99_999_999;

/**
 * Appends whole numbers of at most 9 digits, separated by commas, at `count`. Returns the new
 * count; 0 for any other text.
 */
function readIds(bytes: Uint8Array, ids: Int32Array, count: number): number {
  let end = count;
  /** The number being read, or -1. */
  let id = -1;
  let hasEnded = false;
  for (let at = 0; at < bytes.length; at += 1) {
    const byte = bytes[at] as number;
    if (byte >= 0x30 && byte <= 0x39) {
      if (hasEnded || id === 0 || id > MOST_BEFORE_LAST_DIGIT) return 0;
      id = (id === -1 ? 0 : 10 * id) + byte - 0x30;
    } else if (byte === COMMA) {
      if (id === -1) return 0;
      ids[end++] = id;
      id = -1;
      hasEnded = false;
    } else if (!isBlankByte(byte)) return 0;
    else hasEnded = id !== -1;
  }
  if (id === -1) return 0;
  ids[end++] = id;
  return end;
}

function isBlankByte(byte: number | undefined): boolean {
  return byte === 0x20 || byte === 0x0a || byte === 0x0d || byte === 0x09;
}
