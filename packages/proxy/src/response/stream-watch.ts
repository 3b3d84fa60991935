import type { Endpoint } from "@kv/fleet/front-end";
import { asBuffer, fieldOf, isDone } from "./event-stream.js";

/** The streams of an API. */
interface StreamForm {
  /**
   * Names of the events that end a stream. Where there is none, `[DONE]` ends it, and its events
   * have choices.
   */
  readonly lastEvents: ReadonlySet<string>;
  /** An event without such a text decides nothing, once there was a choice. */
  readonly decisive: RegExp;
}

const COMPLETIONS: StreamForm = {
  lastEvents: new Set(),
  decisive: /error|\[DONE\]|"index"[ \t]*:[ \t]*[^0 \t]/g,
};
const FORMS: Readonly<Record<Endpoint, StreamForm>> = {
  "/v1/completions": COMPLETIONS,
  "/v1/chat/completions": COMPLETIONS,
  "/v1/responses": {
    lastEvents: new Set(["response.completed", "response.incomplete", "response.failed"]),
    decisive: /error|response\.(?:completed|incomplete|failed)/g,
  },
  "/v1/messages": {
    lastEvents: new Set(["message_stop", "error"]),
    decisive: /error|message_stop/g,
  },
};

const NOTHING = Buffer.alloc(0);
const BYTE_ORDER_MARK = "\u00ef\u00bb\u00bf";
/** Longer than each line that decides something as a whole. */
const HEAD_LENGTH = 64;
const LINE_END = /[\r\n]/g;
const DONE_LINES = ["data: [DONE]", "data:[DONE]"];

/**
 * Checks an instance's event stream while it passes, byte for byte. Each decision is made at a
 * certain byte of the stream, wherever the reads of the network end: the bytes before it pass, and
 * after a problem none. Only a line that may be `data: [DONE]` is held back until it has ended.
 */
export class StreamWatch {
  readonly #form: StreamForm;
  readonly #hasChoices: boolean;
  readonly #onePart: boolean;
  /** The line that is held back. It will be read again from its begin. */
  #held: Buffer = NOTHING;
  /** The begin of the line that has not ended, a character for each byte. */
  #head = "";
  #lineLength = 0;
  /** How much of a byte order mark the stream began with; undefined when that is over. */
  #mark: number | undefined = 0;
  #endsWithCr = false;
  #isBetweenEvents = true;
  #isLastEvent = false;
  readonly #choice = new TokenSearch(INDEX_OF_CHOICE);
  readonly #error = new TokenSearch(ERROR, { onlyAtBegin: true });
  #answered: boolean;
  #failed = false;
  #ended = false;
  #problem: string | undefined = undefined;

  /** `onePart`: the request had one prompt and one copy, so all choices have the index 0. */
  constructor(endpoint: Endpoint, onePart: boolean) {
    this.#form = FORMS[endpoint];
    this.#hasChoices = this.#form.lastEvents.size === 0;
    this.#onePart = onePart;
    this.#answered = !this.#hasChoices;
  }

  /** Whether the instance reported a failure in an event of the stream. */
  get failed(): boolean {
    return this.#failed;
  }

  /** What is wrong with the stream; undefined for nothing. */
  get problem(): string | undefined {
    return this.#problem;
  }

  /** Reads the next bytes, and returns those that may pass. */
  push(chunk: Uint8Array): Buffer {
    if (this.#problem !== undefined) return NOTHING;
    const given = asBuffer(chunk);
    const bytes = this.#held.length === 0 ? given : Buffer.concat([this.#held, given]);
    this.#held = NOTHING;
    const passing = this.#read(bytes.toString("latin1"));
    if (passing === bytes.length) return bytes;
    if (this.#problem === undefined) this.#held = bytes.subarray(passing);
    return bytes.subarray(0, passing);
  }

  /**
   * The stream has ended: returns the last bytes that may pass. A stream without its last event has
   * a problem.
   */
  end(): Buffer {
    const bytes = this.#held;
    this.#held = NOTHING;
    if (bytes.length > 0) {
      this.#addToLine(bytes.toString("latin1"), 0, bytes.length);
      this.#endLine();
    }
    if (!this.#ended) this.#problem ??= "ended its stream without its last event";
    return this.#problem === undefined ? bytes : NOTHING;
  }

  /** Returns how many of the characters may pass. */
  #read(text: string): number {
    const plain = new PlainEvents(text, this.#form.decisive, this.#hasChoices);
    let at = this.#mark === undefined ? 0 : this.#readMark(text, this.#mark);
    while (at < text.length) {
      if (this.#isBetweenEvents && !this.#ended) {
        const end = plain.endFrom(at);
        this.#answered ||= end > at && plain.hasChoice(at);
        if (end > at && this.#answered) {
          this.#endsWithCr = false;
          at = end;
          if (at === text.length) break;
        }
      }
      LINE_END.lastIndex = at;
      const end = LINE_END.test(text) ? LINE_END.lastIndex - 1 : text.length;
      const isRestOfCrLf =
        end === at && text[at] === "\n" && this.#endsWithCr && this.#lineLength === 0;
      if (end > at) {
        const passing = this.#readLine(text, at, end);
        if (passing < end) return passing;
      }
      if (end === text.length) break;
      if (!isRestOfCrLf) this.#endLine();
      if (this.#problem !== undefined) return at;
      this.#endsWithCr = text[end] === "\r";
      at = end + 1;
    }
    return text.length;
  }

  /** Skips the rest of a byte order mark. Returns what follows. */
  #readMark(text: string, from: number): number {
    let length = from;
    while (length < BYTE_ORDER_MARK.length && text[length - from] === BYTE_ORDER_MARK[length])
      length += 1;
    const isOver = length === BYTE_ORDER_MARK.length || length - from < text.length;
    this.#mark = isOver ? undefined : length;
    // Its first bytes alone are the begin of a line.
    if (isOver && length > 0 && length < BYTE_ORDER_MARK.length) {
      this.#addToLine(BYTE_ORDER_MARK, 0, length);
      this.#isBetweenEvents = false;
    }
    return length - from;
  }

  /**
   * Reads more of a line. Returns where a problem is; or `from`, where the line is held back; else
   * `to`.
   */
  #readLine(text: string, from: number, to: number): number {
    const before = this.#lineLength;
    this.#addToLine(text, from, to);
    const line = this.#head;
    const mayBeDone =
      this.#ended !== this.#hasChoices && DONE_LINES.some((done) => isBeginOf(done, line));
    if (this.#ended && !mayBeDone && !line.startsWith(":")) {
      this.#problem = "sent more after the last event of its stream";
      return from;
    }
    if (mayBeDone && to === text.length) {
      this.#beginLine();
      return from;
    }
    this.#isBetweenEvents = false;
    if (!line.startsWith("data:")) return to;
    return this.#readData(text, from + Math.max(0, "data:".length - before), to);
  }

  /** Returns where a problem is, else `to`. */
  #readData(text: string, from: number, to: number): number {
    if (!this.#failed)
      for (let at = from; at < to && this.#error.isPossible; at += 1)
        if (this.#error.next(text.charCodeAt(at)) && text[at] !== "n") this.#failed = true;
    if (!this.#hasChoices) return to;
    for (let at = from; at < to && (this.#onePart || !this.#answered); at += 1) {
      const isIndex = this.#choice.next(text.charCodeAt(at));
      if (this.#choice.found >= CHOICE_TOKENS) this.#answered = true;
      if (!isIndex || text[at] === "0" || !this.#onePart) continue;
      this.#problem = "streamed a choice with another index than 0";
      return at;
    }
    return to;
  }

  #endLine(): void {
    const line = this.#head;
    const isWhole = this.#lineLength <= HEAD_LENGTH;
    this.#beginLine();
    if (line === "") {
      this.#ended ||= this.#isLastEvent;
      this.#isBetweenEvents = true;
      this.#choice.restart();
      this.#error.restart();
      return;
    }
    const { name, value } = fieldOf(line);
    if (name === "data" && isWhole && isDone(value)) this.#takeDone();
    else if (this.#ended && name !== "")
      this.#problem = "sent more after the last event of its stream";
    else if (name === "event" && isWhole) {
      this.#isLastEvent ||= this.#form.lastEvents.has(value);
      this.#failed ||= value === "error";
    }
  }

  /** After the last event of another API, it says nothing more. */
  #takeDone(): void {
    if (!this.#hasChoices) return;
    if (this.#answered || this.#failed) this.#ended = true;
    else this.#problem = "ended its stream without a choice";
  }

  #addToLine(text: string, from: number, to: number): void {
    if (this.#lineLength < HEAD_LENGTH)
      this.#head += text.slice(from, Math.min(to, from + HEAD_LENGTH - this.#lineLength));
    this.#lineLength += to - from;
  }

  #beginLine(): void {
    this.#head = "";
    this.#lineLength = 0;
  }
}

const INDEX_OF_CHOICE = ['"choices"', ":", "[", "{", '"index"', ":"];
const ERROR = ["{", '"error"', ":"];
const CHOICE = /"choices"[ \t]*:[ \t]*\[[ \t]*\{/;
/** Of the tokens of a choice's index, those that show that there is a choice. */
const CHOICE_TOKENS = 4;

/** Whether `line` is a begin of `done`, or `done` with blanks after it. */
function isBeginOf(done: string, line: string): boolean {
  return done.startsWith(line) || (line.startsWith(done) && line.slice(done.length).trim() === "");
}

/**
 * Finds tokens of JSON that follow one another, blanks between, in a text that comes a character at
 * a time. Quotes inside of strings are escaped, so no string matches.
 */
class TokenSearch {
  readonly #tokens: readonly string[];
  readonly #onlyAtBegin: boolean;
  #found = 0;
  /** Characters of the next token. */
  #length = 0;
  #last = 0;
  #isPossible = true;

  constructor(tokens: readonly string[], { onlyAtBegin = false } = {}) {
    this.#tokens = tokens;
    this.#onlyAtBegin = onlyAtBegin;
  }

  /** How many of the tokens were found. */
  get found(): number {
    return this.#found;
  }

  /** Whether all of them may still be found. */
  get isPossible(): boolean {
    return this.#isPossible;
  }

  restart(): void {
    this.#found = 0;
    this.#length = 0;
    this.#isPossible = true;
  }

  /** Whether this is the first character of what follows the tokens. */
  next(code: number): boolean {
    const token = this.#tokens[this.#found];
    const isBlank = code === 0x20 || code === 0x09;
    if (token !== undefined && code === token.charCodeAt(this.#length)) {
      this.#length += 1;
      if (this.#length === token.length) {
        this.#found += 1;
        this.#length = 0;
      }
    } else if (!isBlank || this.#length > 0) this.#lose(code);
    this.#last = code;
    return token === undefined && !isBlank;
  }

  /**
   * Goes on with the longest begin of the first token that the text ends with. No token has more
   * than its first two characters inside of it.
   */
  #lose(code: number): void {
    const [first = ""] = this.#tokens;
    this.#isPossible = !this.#onlyAtBegin;
    this.#found = 0;
    if (code === first.charCodeAt(0)) this.#length = 1;
    else this.#length = this.#last === first.charCodeAt(0) && code === first.charCodeAt(1) ? 2 : 0;
  }
}

/** Finds the events of a chunk that need not be read, as they are whole and decide nothing. */
class PlainEvents {
  readonly #text: string;
  readonly #decisive: RegExp;
  readonly #oneLine: boolean;
  readonly #mayBePlain: boolean;
  /** Where the next decisive text begins. */
  #decisiveAt = -1;

  /** `oneLine`: data of several lines could decide something between them. */
  constructor(text: string, decisive: RegExp, oneLine: boolean) {
    this.#text = text;
    this.#decisive = decisive;
    this.#oneLine = oneLine;
    this.#mayBePlain = !text.includes("\r");
  }

  /** Whether the event has a choice, where it is one line. */
  hasChoice(from: number): boolean {
    const line = this.#text.slice(from, this.#text.indexOf("\n", from));
    return line.startsWith("data:") && CHOICE.test(line);
  }

  /** The end of such events from the begin of an event on; `from` where there is none. */
  endFrom(from: number): number {
    if (!this.#mayBePlain) return from;
    if (this.#decisiveAt < from) {
      this.#decisive.lastIndex = from;
      this.#decisiveAt = this.#decisive.exec(this.#text)?.index ?? this.#text.length;
    }
    if (!this.#oneLine) {
      const blankLine = this.#text.lastIndexOf("\n\n", this.#decisiveAt - 1);
      return blankLine < from ? from : blankLine + 2;
    }
    let at = from;
    for (;;) {
      const end = this.#text.indexOf("\n", at);
      if (end === -1 || end >= this.#decisiveAt || this.#text[end + 1] !== "\n") return at;
      at = end + 2;
    }
  }
}
