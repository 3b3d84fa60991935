import { ByteCollector } from "../bodies/read-body.js";
import { asBuffer, editText, type TextEdit } from "../json/json-reader.js";

/** A server-sent event, or comments and other fields between events. */
export interface StreamEvent {
  /** Includes the final blank line. */
  readonly bytes: Buffer;
  readonly name: string;
  /** Lines are joined by LF. Empty if there is no event. */
  readonly data: string;
  /** The stream ended before the blank line. */
  readonly isCut: boolean;
}

/** Whether an event is `[DONE]`, which ends a stream. */
export function isDone({ data }: StreamEvent): boolean {
  return data.startsWith("[DONE]") && data.trimEnd() === "[DONE]";
}

/** Holds the ids of a prompt of millions of tokens. */
const EVENT_BYTES = 64 * 1024 * 1024;
const LF = 0x0a;
const CR = 0x0d;
const LINE_END = /\r\n?|\n/;
/** Matches text with one character per byte. */
const DATA_LINE = /(?<=^|[\r\n]|^\u00ef\u00bb\u00bf)(data(?:: ?|(?=[\r\n]|$)))([^\r\n]*)/g;

/**
 * Divides a stream into events, wherever its chunks end. Lines end with LF, CRLF or CR. The events
 * hold all bytes, in order.
 */
export class EventFrames {
  readonly #encoding: "utf8" | "latin1";
  readonly #limitBytes: number;
  readonly #held = new ByteCollector();
  #isLineEmpty = true;
  #endsWithCr = false;
  #isFirst = true;
  #problem: string | undefined;

  /** `latin1` gives one character per byte. `limitBytes` bounds one event. */
  constructor(encoding: "utf8" | "latin1", limitBytes = EVENT_BYTES) {
    this.#encoding = encoding;
    this.#limitBytes = limitBytes;
  }

  /** Set after an event above the limit; nothing more is read then. */
  get problem(): string | undefined {
    return this.#problem;
  }

  /** Returns the events that end in this chunk. */
  push(chunk: Uint8Array): StreamEvent[] {
    const bytes = asBuffer(chunk);
    const events: StreamEvent[] = [];
    const hasCr = bytes.includes(CR);
    const isRestOfCrLf = this.#endsWithCr && bytes[0] === LF;
    let at = isRestOfCrLf ? 1 : 0;
    let from = 0;
    if (isRestOfCrLf && this.#held.length === 0) from = this.#take(bytes, 0, 1, events);
    for (let end = lineEnd(bytes, at, hasCr); end !== -1; end = lineEnd(bytes, at, hasCr)) {
      const isBlank = this.#isLineEmpty && end === at;
      at = bytes[end] === CR && bytes[end + 1] === LF ? end + 2 : end + 1;
      this.#isLineEmpty = true;
      if (isBlank) from = this.#take(bytes, from, at, events);
    }
    if (at < bytes.length) this.#isLineEmpty = false;
    if (bytes.length > 0) this.#endsWithCr = bytes[bytes.length - 1] === CR;
    if (from < bytes.length && this.#isWithin(bytes.length - from))
      this.#held.push(bytes.subarray(from));
    return events;
  }

  /** Returns the part of an event before the stream's end. */
  end(): StreamEvent[] {
    const bytes = this.#held.take();
    return bytes.length === 0 || this.#problem !== undefined ? [] : [this.#read(bytes, true)];
  }

  #take(bytes: Buffer, from: number, to: number, events: StreamEvent[]): number {
    if (!this.#isWithin(to - from)) return to;
    let event = bytes.subarray(from, to);
    if (this.#held.length > 0) {
      this.#held.push(event);
      event = this.#held.take();
    }
    events.push(this.#read(event, false));
    return to;
  }

  #isWithin(lengthBytes: number): boolean {
    if (this.#held.length + lengthBytes > this.#limitBytes)
      this.#problem ??= `sent an event of more than ${this.#limitBytes} bytes`;
    return this.#problem === undefined;
  }

  #read(bytes: Buffer, isCut: boolean): StreamEvent {
    const hasMark = this.#isFirst && bytes[0] === 0xef && bytes[1] === 0xbb && bytes[2] === 0xbf;
    this.#isFirst = false;
    const text = bytes.toString(this.#encoding, hasMark ? 3 : 0);
    // Most events are one line of data.
    const isOneLine = text.indexOf("\n") === text.length - 2 && !text.includes("\r");
    if (isOneLine && !isCut && text.startsWith("data: "))
      return { bytes, name: "", data: text.slice("data: ".length, -2), isCut };
    let name = "";
    let data: string | undefined;
    for (const line of text.split(LINE_END)) {
      const colon = line.indexOf(":");
      const field = colon === -1 ? line : line.slice(0, colon);
      const value = colon === -1 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
      if (field === "data") data = data === undefined ? value : `${data}\n${value}`;
      else if (field === "event") name = value;
    }
    return { bytes, name, data: data ?? "", isCut };
  }
}

function lineEnd(bytes: Buffer, from: number, hasCr: boolean): number {
  if (!hasCr) return bytes.indexOf(LF, from);
  for (let at = from; at < bytes.length; at += 1)
    if (bytes[at] === LF || bytes[at] === CR) return at;
  return -1;
}

/** Edits an event's data. All other bytes stay. */
export function editData(event: StreamEvent, edits: readonly TextEdit[]): Buffer {
  let at = 0;
  const lines = event.bytes
    .toString("latin1")
    .replace(DATA_LINE, (_line, field: string, value: string) => {
      const edited = field + editText(value, edits, at);
      at += value.length + 1;
      return edited;
    });
  return Buffer.from(lines, "latin1");
}
