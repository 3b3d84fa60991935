import type { YieldingQueue } from "@kv/interface";
import { KvError } from "@kv/interface";
import {
  asBuffer,
  BACKSLASH,
  CLOSE_LIST,
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
  return yield* new Pieces(asBuffer(given), pieceBytes, longMemberBytes, idsMember).parse();
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

const BOM = "\u00ef\u00bb\u00bf";
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Elements of a list or members of an object, or the begin of one up to its long value. */
interface Group {
  readonly from: number;
  readonly end: number;
  readonly isLong: boolean;
}

class Pieces {
  /** After the long value that was parsed last. */
  #at = 0;
  readonly #shortMembers: string[] = [];
  readonly #long = new Map<string, Uint8Array>();
  readonly #repeated = new Set<string>();

  constructor(
    private readonly bytes: Buffer,
    private readonly pieceBytes: number,
    private readonly longMemberBytes: number,
    private readonly idsMember: string | undefined,
  ) {}

  *parse(): Generator<undefined, ParsedPieces> {
    const { bytes } = this;
    const begin = bytes.toString("latin1", 0, BOM.length) === BOM ? BOM.length : 0;
    const value = yield* this.#value(this.#afterBlanks(begin), 1, false);
    if (!this.#isBlank(this.#at, bytes.length)) throw new SyntaxError("the text is not one value");
    return {
      value,
      text: `{${this.#shortMembers.join(",")}}`,
      long: Array.from(this.#long, ([key, bytes]) => ({ key, value: bytes })),
      repeated: this.#repeated,
    };
  }

  /** `depth` is 1 for the outermost value. `hasIds`: a list of token ids. */
  *#value(start: number, depth: number, hasIds: boolean): Generator<undefined, unknown> {
    switch (this.bytes[start]) {
      case QUOTE:
        return yield* this.#string(start);
      case OPEN_OBJECT:
        return yield* this.#object(start, depth);
      case OPEN_LIST:
        return (
          (hasIds ? yield* this.#ids(start) : undefined) ??
          (yield* this.#list(start, depth, hasIds))
        );
      default:
        this.#at = this.bytes.length;
        return JSON.parse(this.#text(start, this.#at));
    }
  }

  *#list(start: number, depth: number, hasIds: boolean): Generator<undefined, unknown[]> {
    const value: unknown[] = [];
    for (const group of this.#groups(start, depth)) {
      if (group?.isLong === true) {
        if (!this.#isBlank(group.from, group.end)) throw twoValues();
        value.push(yield* this.#value(group.end, depth + 1, hasIds));
      } else if (group !== undefined) {
        const elements = JSON.parse(`[${this.#text(group.from, group.end)}]`) as unknown[];
        if (elements.length === 0) throw new SyntaxError("an element is missing");
        for (const element of elements) value.push(element);
      }
      yield;
    }
    return value;
  }

  *#object(start: number, depth: number): Generator<undefined, Record<string, unknown>> {
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
    for (const group of this.#groups(start, depth)) {
      yield;
      if (group === undefined) continue;
      const { from, end, isLong } = group;
      const text = this.#text(from, end);
      const members = JSON.parse(`{${text}${isLong ? "[]" : ""}}`) as object;
      const keys = Object.keys(members);
      const [key] = keys;
      if (key === undefined) throw new SyntaxError("a member is missing");
      if (isLong) {
        set(key, yield* this.#value(end, depth + 1, isOutermost && key === this.idsMember));
        if (isOutermost) this.#long.set(key, this.bytes.subarray(end, this.#at));
      } else {
        for (const [name, member] of Object.entries(members)) set(name, member);
        if (isOutermost) this.#shortMembers.push(text);
        if (isOutermost) for (const name of keys) this.#long.delete(name);
      }
    }
    return value;
  }

  /**
   * Divides a list or an object into groups at commas. A long value is the end of its group, and
   * the caller parses it before it asks for the next one. Undefined after a piece without a group.
   */
  *#groups(start: number, depth: number): Generator<Group | undefined> {
    const { bytes, pieceBytes } = this;
    const isList = bytes[start] === OPEN_LIST;
    const longBytes = depth === 1 ? this.longMemberBytes : pieceBytes;
    let reader = new JsonReader();
    let level = 0;
    /** Where the group begins, its last element or member, and the value or key that is open. */
    let [from, element, inner] = [start + 1, start + 1, -1];
    let isValue = isList;
    let hasLong = false;
    for (let scanned = from; scanned < bytes.length; ) {
      const piece = bytes.subarray(scanned, scanned + pieceBytes);
      let end = scanned + piece.length;
      for (let found = reader.next(piece, 0); found !== -1; found = reader.next(piece, found + 1)) {
        const at = scanned + found;
        const before = level;
        level = reader.depth + Number(reader.inString);
        if (level > 0) {
          if (before === 0) inner = at;
        } else if (before > 0) {
          if (isValue && at + 1 - inner > longBytes) {
            end = at + 1;
            break;
          }
          inner = -1;
        } else if (reader.token === COLON) isValue = true;
        else {
          const isLast = level < 0;
          const isFull = isLast
            ? from > start + 1 || !this.#isBlank(from, at)
            : at - from >= pieceBytes;
          if (hasLong && !this.#isBlank(from, at)) throw twoValues();
          if (!hasLong && isFull) yield { from, end: at, isLong: false };
          if (isLast) {
            // In ASCII, } and ] come two after { and [.
            if (bytes[at] !== (bytes[start] as number) + 2)
              throw new SyntaxError("a bracket is of the other kind");
            this.#at = at + 1;
            return;
          }
          if (hasLong || isFull) from = at + 1;
          element = at + 1;
          isValue = isList;
          hasLong = false;
        }
      }
      scanned = end;
      if (inner === -1 || !isValue || end - inner <= longBytes) {
        yield undefined;
        continue;
      }
      if (hasLong) throw twoValues();
      if (element > from) yield { from, end: element - 1, isLong: false };
      yield { from: element, end: inner, isLong: true };
      from = element = scanned = this.#at;
      [reader, level, inner, hasLong] = [new JsonReader(), 0, -1, true];
    }
    throw new SyntaxError("the text ends early");
  }

  /** Undefined unless all are whole numbers of at most 9 digits. */
  *#ids(start: number): Generator<undefined, Int32Array | undefined> {
    const { bytes, pieceBytes } = this;
    if (!isDigit(bytes[this.#afterBlanks(start + 1)])) return undefined;
    const end = bytes.indexOf(CLOSE_LIST, start);
    // V8 does not count shared memory. It would else collect all garbage after a few long bodies.
    const ids = new Int32Array(new SharedArrayBuffer(4 * Math.max(0, (end - start) >> 1)));
    let count = 0;
    for (let from = start + 1; from <= end; yield) {
      const comma = bytes.indexOf(COMMA, from + pieceBytes);
      const to = comma === -1 ? end : Math.min(comma, end);
      count = readIds(bytes.subarray(from, to), ids, count);
      if (count === 0) return undefined;
      from = to + 1;
    }
    this.#at = end + 1;
    // Without a bracket nothing was read.
    return count === 0 ? undefined : ids.subarray(0, count);
  }

  *#string(start: number): Generator<undefined, string> {
    let value = "";
    let from = start + 1;
    for (;;) {
      const reader = new JsonReader();
      reader.inString = true;
      // An escape has at most 6 bytes, a character 4.
      const most = from + Math.max(16, this.pieceBytes);
      const found = reader.next(this.bytes.subarray(from, most), 0);
      if (found === -1 && most >= this.bytes.length) throw new SyntaxError("the text ends early");
      const to = found === -1 ? this.#cutOfString(from, most) : from + found;
      value += JSON.parse(`"${this.#text(from, to)}"`) as string;
      from = to;
      if (found === -1) yield;
      else break;
    }
    this.#at = from + 1;
    return value;
  }

  /** Cuts a string before `most`, outside its escapes and characters. */
  #cutOfString(from: number, most: number): number {
    const { bytes } = this;
    const slash = most - 5 + bytes.subarray(most - 5, most).lastIndexOf(BACKSLASH);
    let slashes = 0;
    while (slash - slashes >= from && bytes[slash - slashes] === BACKSLASH) slashes += 1;
    if (slashes % 2 === 1) return slash;
    let to = most;
    while (to > most - 4 && ((bytes[to] as number) & 0xc0) === 0x80) to -= 1;
    return to;
  }

  #isBlank(from: number, end: number): boolean {
    return this.#afterBlanks(from) >= end;
  }

  #afterBlanks(from: number): number {
    let at = from;
    while (isBlankByte(this.bytes[at])) at += 1;
    return at;
  }

  #text(from: number, end: number): string {
    return utf8.decode(this.bytes.subarray(from, end));
  }
}

const twoValues = () => new SyntaxError("two values without a comma");

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
    if (isDigit(byte)) {
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

function isDigit(byte: number | undefined): boolean {
  return byte !== undefined && byte >= 0x30 && byte <= 0x39;
}

function isBlankByte(byte: number | undefined): boolean {
  return byte === 0x20 || byte === 0x0a || byte === 0x0d || byte === 0x09;
}
