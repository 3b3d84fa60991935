import type { YieldingQueue } from "@kv/interface";
import { KvError } from "@kv/interface";
import { IdList, isBlankByte } from "./id-list.js";

/**
 * A body of at most this many bytes is read and parsed at once; a longer one in steps, between
 * those of other bodies.
 */
export const AT_ONCE_BYTES = 64 * 1024;
/** Bytes that are parsed at once: half a millisecond, where they are a list of token ids. */
const PIECE_BYTES = 64 * 1024;
/** A member of the outermost object that is longer than this is found by its position. */
const LONG_MEMBER_BYTES = 4 * 1024;

const QUOTE = 0x22;
const BACKSLASH = 0x5c;

/** A long member of the outermost object. */
export interface LongMember {
  /** Its name. */
  readonly key: string;
  /** Its value as it was written. */
  readonly value: Uint8Array;
}

/** A JSON text that was parsed in pieces. */
export interface ParsedPieces {
  /** As of `JSON.parse`. */
  readonly value: unknown;
  /** The outermost object without its long members; empty for another value. */
  readonly text: string;
  /** The long members of the outermost object. None is repeated in `text` after its place. */
  readonly long: readonly LongMember[];
  /** The members of the outermost object that occur again in another piece. */
  readonly repeated: ReadonlySet<string>;
}

/** A list or an object whose end has not come. */
interface Container {
  /** Position of its bracket. */
  readonly open: number;
  readonly isObject: boolean;
  /** Where its current element or member begins. */
  elementStart: number;
  /** Set when it is too long to be parsed at once: then its elements are added in groups. */
  value: unknown[] | IdList | Record<string, unknown> | undefined;
  /** The elements of its list that were added. */
  count: number;
  /** Its name in the object that contains it. */
  key: string | undefined;
}

/** A string that is parsed in pieces. */
interface LongString {
  readonly key: string | undefined;
  /** Positions of its quotes. */
  readonly quote: number;
  readonly close: number;
  /** Where the next piece begins. */
  from: number;
  value: string;
}

/** How a text is parsed in pieces. */
export interface PieceOptions {
  /**
   * A member of the outermost object with lists of token ids. A long one of whole numbers of at
   * most 9 digits becomes an `Int32Array`. @default none
   */
  readonly idsMember?: string | undefined;
  /** Bytes that are parsed at once. @default 64 KiB */
  readonly pieceBytes?: number | undefined;
  /** A longer member of the outermost object is in `long`. @default 4 KiB */
  readonly longMemberBytes?: number | undefined;
}

/**
 * Parses JSON as `JSON.parse` does, and yields after each piece, so that the caller can serve
 * others between the pieces. Lists, objects and strings of any depth are cut. Throws for what is
 * not JSON. The text must have passed a `JsonScan`, which limits its depth and members.
 */
export function* parseJsonPieces(
  bytes: Uint8Array,
  options: PieceOptions = {},
): Generator<undefined, ParsedPieces> {
  const pieces = new Pieces(bytes, options);
  try {
    while (pieces.next()) yield;
    return pieces.end();
  } catch (error) {
    if (!(error instanceof OtherThanIds)) throw error;
  }
  return yield* parseJsonPieces(bytes, { ...options, idsMember: undefined });
}

/** A list that began with token ids has something else. */
class OtherThanIds extends Error {}

const BOM = [0xef, 0xbb, 0xbf];
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

class Pieces {
  readonly #bytes: Uint8Array;
  readonly #idsMember: string | undefined;
  readonly #pieceBytes: number;
  readonly #longMemberBytes: number;
  /** The open containers. The first one stands for the whole text, as a list of one element. */
  readonly #open: Container[];
  /** How many of them have a value. */
  #cut = 1;
  #at: number;
  /** Where the bytes begin that are not parsed yet. */
  #from: number;
  /** The value of the current element was parsed in pieces; only blanks may follow it. */
  #hasValue = false;
  /** A string whose closing quote has not been found, and where the search goes on. */
  #openString: { readonly quote: number; readonly from: number } | undefined = undefined;
  /** A long string that is being parsed. */
  #longString: LongString | undefined = undefined;
  /** Room was made for all elements of a list of numbers. */
  #hasRoom = false;
  readonly #shortMembers: string[] = [];
  readonly #long = new Map<string, Uint8Array>();
  readonly #repeated = new Set<string>();

  constructor(
    bytes: Uint8Array,
    { idsMember, pieceBytes = PIECE_BYTES, longMemberBytes = LONG_MEMBER_BYTES }: PieceOptions,
  ) {
    this.#bytes = bytes;
    this.#idsMember = idsMember;
    this.#pieceBytes = pieceBytes;
    this.#longMemberBytes = longMemberBytes;
    this.#at = BOM.every((byte, at) => bytes[at] === byte) ? BOM.length : 0;
    this.#from = this.#at;
    this.#open = [
      { open: -1, isObject: false, elementStart: this.#at, value: [], count: 0, key: undefined },
    ];
  }

  /** Reads on to the end of a piece. Returns whether there is more. */
  next(): boolean {
    if (this.#longString !== undefined) {
      this.#nextOfString(this.#longString);
      return true;
    }
    if (this.#openString !== undefined) {
      this.#string(this.#openString.quote, this.#openString.from);
      return true;
    }
    const bytes = this.#bytes;
    const end = this.#at + this.#pieceBytes;
    while (this.#at < bytes.length) {
      if (this.#at >= end || this.#longString !== undefined || this.#openString !== undefined)
        return true;
      const at = this.#at;
      const byte = bytes[at];
      this.#at = at + 1;
      if (byte === QUOTE) this.#string(at);
      else if (byte === 0x2c) this.#comma(at);
      else if (byte === 0x5b || byte === 0x7b) {
        const elementStart = at + 1;
        this.#open.push({
          open: at,
          isObject: byte === 0x7b,
          elementStart,
          value: undefined,
          count: 0,
          key: undefined,
        });
        if (this.#cut === 1) this.#cutNext();
      } else if (byte === 0x5d || byte === 0x7d) this.#close(at, byte === 0x7d);
    }
    return this.#longString !== undefined;
  }

  end(): ParsedPieces {
    if (this.#open.length !== 1) throw new SyntaxError("the text ends early");
    this.#endElements(this.#bytes.length);
    const list = this.#innermost().value as unknown[];
    if (list.length !== 1) throw new SyntaxError("the text is not one value");
    const text = `{${this.#shortMembers.join(",")}}`;
    const long = Array.from(this.#long, ([key, value]) => ({ key, value }));
    return { value: list[0], text, long, repeated: this.#repeated };
  }

  #innermost(): Container {
    return this.#open[this.#cut - 1] as Container;
  }

  /** How long an element of the innermost container may be that is parsed together with others. */
  get #mostBytes(): number {
    return this.#cut === 2 ? this.#longMemberBytes : this.#pieceBytes;
  }

  #comma(at: number): void {
    const container = this.#open[this.#open.length - 1] as Container;
    const isInnermost = this.#open.length === this.#cut;
    if (isInnermost && (this.#hasValue || at - this.#from >= this.#pieceBytes)) {
      this.#endElements(at);
      this.#from = at + 1;
    }
    container.elementStart = at + 1;
    if (!isInnermost) this.#cutLong(at);
  }

  #close(at: number, isObject: boolean): void {
    const container = this.#open.pop();
    if (container === undefined || this.#open.length === 0)
      throw new SyntaxError("a bracket is not opened");
    if (container.value === undefined) return;
    this.#open.push(container);
    if (container.isObject !== isObject) throw new SyntaxError("a bracket is of the other kind");
    const { open, elementStart } = container;
    const isEmpty =
      elementStart === open + 1 && !this.#hasValue && isBlank(this.#bytes, elementStart, at);
    if (!isEmpty) this.#endElements(at);
    if (Array.isArray(container.value)) container.value.length = container.count;
    const value = container.value instanceof IdList ? container.value.ids : container.value;
    this.#open.pop();
    this.#cut -= 1;
    this.#endValue(container.key, value, container.open, at + 1);
  }

  /** Cuts the containers whose current element has become too long. */
  #cutLong(at: number): void {
    while (
      this.#open.length > this.#cut &&
      at - (this.#open[this.#cut] as Container).open >= this.#mostBytes
    )
      this.#cutNext();
  }

  /**
   * Adds what comes before the outermost container that has no value, and has its elements added to
   * a value of its own.
   */
  #cutNext(): void {
    const container = this.#open[this.#cut] as Container;
    container.key = this.#beginValue(container.open);
    container.value = container.isObject ? {} : [];
    this.#cut += 1;
    this.#from = container.open + 1;
  }

  /** A string. One that is too long is parsed in pieces, unless it is a key. */
  #string(quote: number, from = quote + 1): void {
    const end = this.#endOfString(quote, from);
    if (end === undefined) return;
    this.#at = end;
    if (end - quote < this.#mostBytes) return;
    while (this.#open.length > this.#cut) this.#cutNext();
    if (end - quote < this.#mostBytes) return;
    const { isObject, elementStart } = this.#innermost();
    if (isObject && isBlank(this.#bytes, elementStart, quote)) return;
    const key = this.#beginValue(quote);
    this.#longString = { key, quote, close: end - 1, from: quote + 1, value: "" };
  }

  #nextOfString(string: LongString): void {
    const { key, quote, from, close } = string;
    const to = this.#cutOfString(from, close);
    string.value += JSON.parse(`"${this.#text(from, to)}"`) as string;
    string.from = to;
    if (to < close) return;
    this.#longString = undefined;
    this.#endValue(key, string.value, quote, close + 1);
  }

  /** The position after the closing quote; undefined when the search goes on in the next piece. */
  #endOfString(quote: number, from: number): number | undefined {
    const bytes = this.#bytes;
    let at = from;
    for (let quotes = 0; quotes < this.#pieceBytes; quotes += 1) {
      const close = bytes.indexOf(QUOTE, at);
      if (close === -1) throw new SyntaxError("a string does not end");
      let slashes = 0;
      while (close - 1 - slashes >= at && bytes[close - 1 - slashes] === BACKSLASH) slashes += 1;
      at = close + 1;
      if (slashes % 2 === 1) continue;
      this.#openString = undefined;
      return at;
    }
    this.#openString = { quote, from: at };
    return undefined;
  }

  /** Where a piece of a string ends: not within an escape or a character. */
  #cutOfString(from: number, end: number): number {
    const bytes = this.#bytes;
    // An escape has at most 6 bytes, a character 4.
    const to = from + Math.max(16, this.#pieceBytes);
    if (to >= end) return end;
    for (let at = to - 1; at >= to - 5; at -= 1) {
      if (bytes[at] !== BACKSLASH) continue;
      let slashes = 1;
      while (at - slashes >= from && bytes[at - slashes] === BACKSLASH) slashes += 1;
      if (slashes % 2 === 1) return at;
      break;
    }
    let at = to;
    while (at > to - 4 && ((bytes[at] as number) & 0xc0) === 0x80) at -= 1;
    return at;
  }

  /**
   * Adds the elements before the current one. Returns the key of the current one, whose value
   * begins at `start`.
   */
  #beginValue(start: number): string | undefined {
    const { isObject, elementStart } = this.#innermost();
    if (this.#hasValue) throw new SyntaxError("two values without a comma");
    if (elementStart > this.#from) this.#addElements(elementStart - 1);
    if (isObject)
      return Object.keys(JSON.parse(`{${this.#text(elementStart, start)}[]}`) as object)[0];
    if (!isBlank(this.#bytes, elementStart, start))
      throw new SyntaxError("two values without a comma");
    return undefined;
  }

  /** Adds the value of the current element to the innermost container. */
  #endValue(key: string | undefined, value: unknown, start: number, end: number): void {
    const container = this.#innermost();
    if (container.value instanceof IdList) throw new OtherThanIds();
    if (Array.isArray(container.value)) container.value[container.count++] = value;
    else this.#setMember(container.value as Record<string, unknown>, key as string, value);
    if (this.#cut === 2 && key !== undefined) this.#long.set(key, this.#bytes.subarray(start, end));
    this.#hasValue = true;
    this.#from = end;
  }

  /** Adds all elements that end before `end`: a comma, or the end of the innermost container. */
  #endElements(end: number): void {
    if (this.#hasValue) {
      if (!isBlank(this.#bytes, this.#from, end))
        throw new SyntaxError("two values without a comma");
      this.#hasValue = false;
      return;
    }
    this.#addElements(end);
  }

  /** Parses the elements from `#from` to `end`, at least one. */
  #addElements(end: number): void {
    const container = this.#innermost();
    if (this.#addIds(container, end)) return;
    const { value } = container;
    const bytes = end - this.#from;
    const text = this.#text(this.#from, end);
    this.#from = end;
    if (Array.isArray(value)) {
      const elements = JSON.parse(`[${text}]`) as unknown[];
      if (elements.length === 0) throw new SyntaxError("an element is missing");
      if (!this.#hasRoom && typeof elements[0] === "number") {
        // V8 would copy a list that grows to millions of numbers again and again. Once in a text:
        // then there is no more room than its bytes pay for.
        this.#hasRoom = true;
        value.length =
          container.count +
          Math.ceil((elements.length / bytes) * (this.#bytes.length - end + bytes));
      }
      for (const element of elements) value[container.count++] = element;
      return;
    }
    const members = JSON.parse(`{${text}}`) as Record<string, unknown>;
    const keys = Object.keys(members);
    if (keys.length === 0) throw new SyntaxError("a member is missing");
    for (const key of keys) this.#setMember(value as Record<string, unknown>, key, members[key]);
    if (this.#cut !== 2) return;
    this.#shortMembers.push(text);
    if (this.#long.size > 0) for (const key of keys) this.#long.delete(key);
  }

  /**
   * As `#addElements`, where the container is a list of token ids so far. Returns false for another
   * one.
   */
  #addIds(container: Container, end: number): boolean {
    const from = this.#from;
    if (container.value instanceof IdList) {
      if (!container.value.add(this.#bytes, from, end)) throw new OtherThanIds();
    } else {
      if (this.#idsMember === undefined || this.#open[2]?.key !== this.#idsMember) return false;
      if (container.isObject || container.count > 0) return false;
      const list = new IdList(this.#bytes.length - from);
      if (!list.add(this.#bytes, from, end)) return false;
      container.value = list;
    }
    this.#from = end;
    return true;
  }

  /** Of a key that occurs again the last value counts. `__proto__` is a key like another. */
  #setMember(object: Record<string, unknown>, key: string, value: unknown): void {
    if (this.#cut === 2 && Object.hasOwn(object, key)) this.#repeated.add(key);
    if (key !== "__proto__") object[key] = value;
    else
      Object.defineProperty(object, key, {
        value,
        configurable: true,
        enumerable: true,
        writable: true,
      });
  }

  #text(from: number, end: number): string {
    return utf8.decode(this.#bytes.subarray(from, end));
  }
}

function isBlank(bytes: Uint8Array, from: number, end: number): boolean {
  for (let at = from; at < end; at += 1) if (!isBlankByte(bytes[at])) return false;
  return true;
}

/** The value of a body. Errors: `KV_REQUEST_INVALID`. */
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
