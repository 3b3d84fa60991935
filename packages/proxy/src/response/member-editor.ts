import { asBuffer } from "./event-stream.js";

/**
 * Gives the JSON text that takes the place of a member's value, of which `value` is the JSON text.
 */
export type ValueEdit = (value: string) => string | Promise<string>;

/** Edits by the names of members. `null`: the value becomes `null`, however long it is. */
export type MemberEdits = Readonly<Record<string, ValueEdit | null>>;

/** What leaves; an edit may wait for its text. */
type Piece = Buffer | Promise<Buffer>;
type Place = "outside" | "before-colon" | "before-value" | "in-string" | "in-nested" | "in-literal";
/** Where in a line of a stream. `other`: a line that is no data. */
type LinePart = "begin" | "data" | "other";
/**
 * What becomes of a character: `last` drops it as the last one of a value, `after` passes it as the
 * first one behind.
 */
type Fate = "pass" | "drop" | "last" | "after";

const LF = 0x0a;
const CR = 0x0d;
const BLANK = 0x20;
const QUOTE = 0x22;
const BACKSLASH = 0x5c;
const COLON = 0x3a;
const COMMA = 0x2c;
const N = 0x6e;
const NULL = Buffer.from("null");
const DATA = "data:";
const DATA_LINE = /^(?:\u00ef\u00bb\u00bf)?data:/;
/** As many bytes of a line as tell whether it is data. */
const HEAD_LENGTH = 8;
/** Longer than each name with its quotes. */
const TAIL_LENGTH = 32;

/** How names are looked for. */
interface Search {
  readonly pattern: RegExp;
  /** Texts, at least one of which is in each name. */
  readonly marks: readonly string[];
}

/** By their names: the program has a few lists of them, and each answer is searched for one. */
const searches = new Map<string, Search>();

function searchFor(names: readonly string[]): Search {
  const key = names.join("|");
  let search = searches.get(key);
  if (search === undefined) {
    // What several names have in common is looked for once.
    const marks = new Set(names.map((name) => name.replace(/^.*(?=_transfer_params$)/, "")));
    search = { pattern: new RegExp(`"(${key})"`, "g"), marks: [...marks] };
    searches.set(key, search);
  }
  return search;
}

/**
 * Changes the values of members in JSON, or in the data of a stream's events, wherever the chunks
 * end, and passes all other bytes as they came. Lines may end with LF, CR or CRLF, and data may
 * have several lines. The members may be at any depth. Quotes inside of strings are escaped, so no
 * string is taken for a name.
 */
export class MemberEditor {
  readonly #edits: MemberEdits;
  readonly #isStream: boolean;
  readonly #names: RegExp;
  readonly #marks: readonly string[];
  readonly #erased = new Set<string>();
  #place: Place = "outside";
  #name = "";
  /** The text of a value that an edit reads. */
  #value = "";
  #hasValue = false;
  #depth = 0;
  #isString = false;
  #isEscaped = false;
  /** The begin of the line that has not ended, and its end, in which a name may have begun. */
  #head = "";
  #tail = "";
  /** Of the line, while a member is read. */
  #linePart: LinePart = "data";
  #lineLength = 0;
  #endsWithCr = false;

  constructor(edits: MemberEdits, { isStream }: { readonly isStream: boolean }) {
    this.#edits = edits;
    this.#isStream = isStream;
    const { pattern, marks } = searchFor(Object.keys(edits));
    this.#names = pattern;
    this.#marks = marks;
  }

  /** Names of the members whose values, other than `null`, became `null`. */
  get erased(): ReadonlySet<string> {
    return this.#erased;
  }

  /** Bytes of a value that has not ended, which an edit waits for. */
  get heldBytes(): number {
    return this.#value.length;
  }

  /** Returns what leaves for the next bytes. */
  push(chunk: Uint8Array): Piece {
    const bytes = asBuffer(chunk);
    const isPlain = this.#place === "outside" && this.#tail === "";
    if (isPlain && !this.#marks.some((mark) => bytes.includes(mark))) {
      if (bytes.length > 0 && bytes[bytes.length - 1] !== LF)
        this.#keepLine(bytes.toString("latin1"));
      return bytes;
    }
    // Latin-1 maps each byte to one character.
    const text = bytes.toString("latin1");
    const kept: Piece[] = [];
    for (let at = 0; at < text.length; )
      at =
        this.#place === "outside"
          ? this.#readOutside(text, bytes, at, kept)
          : this.#readMember(text, bytes, at, kept);
    if (this.#place === "outside") this.#keepLine(text);
    return joined(kept);
  }

  /** The last bytes: of a value that never ended. */
  end(): Buffer {
    const value = Buffer.from(this.#value, "latin1");
    this.#value = "";
    return value;
  }

  #keepLine(text: string): void {
    const begin = Math.max(text.lastIndexOf("\n"), text.lastIndexOf("\r")) + 1;
    this.#head = ((begin === 0 ? this.#head : "") + text.slice(begin, begin + HEAD_LENGTH)).slice(
      0,
      HEAD_LENGTH,
    );
    this.#tail = (
      (begin === 0 ? this.#tail : "") + text.slice(Math.max(begin, text.length - TAIL_LENGTH))
    ).slice(-TAIL_LENGTH);
  }

  /** Passes all up to the end of the next name. Returns where that is, or the end of the text. */
  #readOutside(text: string, bytes: Buffer, from: number, kept: Piece[]): number {
    const before = from === 0 ? this.#tail : "";
    const searched = before + text;
    this.#names.lastIndex = from;
    let to = text.length;
    for (
      let found = this.#names.exec(searched);
      found !== null;
      found = this.#names.exec(searched)
    ) {
      const end = this.#names.lastIndex - before.length;
      // One that ends in the tail was found before.
      if (end <= 0 || !this.#isData(text, found.index - before.length)) continue;
      this.#place = "before-colon";
      this.#name = found[1] ?? "";
      this.#linePart = "data";
      this.#lineLength = HEAD_LENGTH;
      this.#endsWithCr = false;
      to = end;
      break;
    }
    kept.push(bytes.subarray(from, to));
    return to;
  }

  /** Whether a position of the text is in a line of data. A negative one is in the tail. */
  #isData(text: string, at: number): boolean {
    if (!this.#isStream) return true;
    const begin =
      at <= 0 ? 0 : Math.max(text.lastIndexOf("\n", at), text.lastIndexOf("\r", at)) + 1;
    const head = (begin === 0 ? this.#head : "") + text.slice(begin, begin + HEAD_LENGTH);
    return DATA_LINE.test(head);
  }

  /** Reads on in a member. Returns where it ends, or the end of the text. */
  #readMember(text: string, bytes: Buffer, from: number, kept: Piece[]): number {
    const isHeld = this.#edits[this.#name] !== null;
    let passed = from;
    const pass = (to: number) => {
      if (to > passed) kept.push(bytes.subarray(passed, to));
      passed = to + 1;
    };
    for (let at = from; at < text.length; at += 1) {
      const fate = this.#fateOf(text.charCodeAt(at));
      if (fate === "pass") continue;
      pass(at);
      if (fate === "after") {
        this.#endMember(kept);
        return at;
      }
      if (isHeld) this.#value += text[at];
      if (fate === "drop") continue;
      this.#endMember(kept);
      return at + 1;
    }
    pass(text.length);
    return text.length;
  }

  /**
   * Goes on outside. What takes the place of a whole value leaves; a value that its event has cut
   * off leaves as it came.
   */
  #endMember(kept: Piece[]): void {
    const edit = this.#edits[this.#name];
    if (this.#hasValue && edit === null) kept.push(NULL);
    else if (this.#hasValue && edit) {
      const value = Buffer.from(this.#value, "latin1").toString();
      const edited = edit(value);
      kept.push(
        typeof edited === "string" ? Buffer.from(edited) : edited.then((text) => Buffer.from(text)),
      );
    } else if (this.#value !== "") kept.push(this.end());
    this.#place = "outside";
    this.#value = "";
    this.#hasValue = false;
    this.#tail = "";
  }

  #fateOf(code: number): Fate {
    if (this.#isStream) {
      const framing = this.#readLine(code);
      if (framing !== undefined) return framing;
    }
    switch (this.#place) {
      case "before-colon":
        if (code === COLON) this.#place = "before-value";
        return code === COLON || code <= BLANK ? "pass" : "after";
      case "before-value":
        return code <= BLANK ? "pass" : this.#beginValue(code);
      case "in-literal":
        return code === COMMA || isClosing(code) || code <= BLANK ? "after" : "drop";
      default:
        return this.#endsValue(code) ? "last" : "drop";
    }
  }

  /**
   * What becomes of a character of a stream that is not of the data; undefined for one that is. The
   * end of an event ends the member too.
   */
  #readLine(code: number): Fate | undefined {
    if (code === LF || code === CR) {
      const isRestOfCrLf = code === LF && this.#endsWithCr;
      const isEventEnd = this.#lineLength === 0 && !isRestOfCrLf;
      this.#endsWithCr = code === CR;
      this.#lineLength = 0;
      this.#linePart = "begin";
      if (!isEventEnd) return "pass";
      this.#hasValue = false;
      return "after";
    }
    this.#endsWithCr = false;
    const at = this.#lineLength;
    this.#lineLength += 1;
    if (this.#linePart === "data") return at === DATA.length && code === BLANK ? "pass" : undefined;
    if (this.#linePart === "begin") {
      if (code !== DATA.charCodeAt(at)) this.#linePart = "other";
      else if (at + 1 === DATA.length) this.#linePart = "data";
    }
    return "pass";
  }

  #beginValue(code: number): Fate {
    this.#place = code === QUOTE ? "in-string" : isOpening(code) ? "in-nested" : "in-literal";
    this.#depth = 1;
    this.#isString = false;
    this.#isEscaped = false;
    this.#hasValue = true;
    if (this.#edits[this.#name] === null && code !== N) this.#erased.add(this.#name);
    return "drop";
  }

  /** Whether a character of a string, a list or an object is its last. */
  #endsValue(code: number): boolean {
    if (this.#isEscaped) this.#isEscaped = false;
    else if (this.#place === "in-string" || this.#isString) {
      if (code === BACKSLASH) this.#isEscaped = true;
      else if (code === QUOTE) {
        this.#isString = false;
        return this.#place === "in-string";
      }
    } else if (code === QUOTE) this.#isString = true;
    else if (isOpening(code)) this.#depth += 1;
    else if (isClosing(code)) this.#depth -= 1;
    return this.#place === "in-nested" && this.#depth === 0;
  }
}

const isOpening = (code: number) => code === 0x7b || code === 0x5b;
const isClosing = (code: number) => code === 0x7d || code === 0x5d;

function joined(parts: readonly Piece[]): Piece {
  const [first] = parts;
  if (parts.length === 1 && first !== undefined) return first;
  const buffers = parts.filter((part) => Buffer.isBuffer(part));
  return buffers.length === parts.length
    ? Buffer.concat(buffers)
    : Promise.all(parts).then((all) => Buffer.concat(all));
}
