import { ByteCollector } from "@kv/http";
import { rawMember } from "../request/json-members.js";

/** A server-sent event. */
export interface StreamedEvent {
  /** Of a line before its data; empty where there is none. */
  readonly name: string;
  /** Several lines are joined by LF. */
  readonly data: string;
}

/** Whether the data of an event is `[DONE]`, which ends a stream of completions. */
export function isDone(data: string): boolean {
  return data.startsWith("[DONE]") && data.trimEnd() === "[DONE]";
}

const LF = 0x0a;
const CR = 0x0d;
const BOM = "\ufeff";
const NOTHING = Buffer.alloc(0);

/**
 * Reads the events of a stream, whose chunks may end anywhere: in a character, or between CR and
 * LF. Lines end with LF, CRLF or CR. Comments, events without data and other fields are dropped,
 * and so is a byte order mark.
 */
export class EventReader {
  readonly #limitBytes: number;
  /** The line that has not ended. */
  readonly #line = new ByteCollector();
  #isFirstLine = true;
  #endsWithCr = false;
  /** Of the event that has not ended, without that line and without line ends. */
  #lengthBytes = 0;
  #name = "";
  #data: string | undefined = undefined;
  #problem: string | undefined = undefined;

  /** `limitBytes`: of one event. */
  constructor(limitBytes: number) {
    this.#limitBytes = limitBytes;
  }

  /**
   * What is wrong with the stream: an event above the limit, after which nothing more is read.
   * Undefined for nothing.
   */
  get problem(): string | undefined {
    return this.#problem;
  }

  /** Returns the events that end in this chunk. */
  push(chunk: Uint8Array): StreamedEvent[] {
    const events: StreamedEvent[] = [];
    const bytes = asBuffer(chunk);
    const hasCr = bytes.includes(CR);
    let from = this.#endsWithCr && bytes[0] === LF ? 1 : 0;
    for (let end = lineEnd(bytes, from, hasCr); end !== -1; end = lineEnd(bytes, from, hasCr)) {
      const event = this.#endLine(bytes, from, end);
      if (event !== undefined) events.push(event);
      from = bytes[end] === CR && bytes[end + 1] === LF ? end + 2 : end + 1;
    }
    if (bytes.length > 0) this.#endsWithCr = bytes[bytes.length - 1] === CR;
    if (from < bytes.length && !this.#isAbove(bytes.length - from))
      this.#line.push(bytes.subarray(from));
    return events;
  }

  /** The stream has ended. Returns the event whose blank line has not come. */
  end(): StreamedEvent[] {
    if (this.#line.length > 0) this.#endLine(NOTHING, 0, 0);
    const event = this.#endEvent();
    return event === undefined ? [] : [event];
  }

  /** The begin of the event that has not ended. */
  begin(): StreamedEvent {
    const { name, value } = fieldOf(this.#textOf(this.#line.begin(BEGIN_BYTES)));
    const before = this.#data === undefined ? "" : `${this.#data.slice(0, BEGIN_BYTES)}\n`;
    return { name: this.#name, data: name === "data" ? before + value : before };
  }

  /** Reads the end of a line. Returns the event that a blank line ends. */
  #endLine(bytes: Buffer, from: number, to: number): StreamedEvent | undefined {
    if (this.#problem !== undefined) return undefined;
    let line = bytes;
    let start = from;
    let end = to;
    if (this.#line.length > 0) {
      this.#line.push(bytes.subarray(from, to));
      line = this.#line.take();
      start = 0;
      end = line.length;
    }
    if (start === end) return this.#endEvent();
    if (this.#isAbove(end - start)) return undefined;
    this.#lengthBytes += end - start;
    const { name, value } = fieldOf(this.#textOf(line, start, end));
    this.#isFirstLine = false;
    if (name === "data") this.#data = this.#data === undefined ? value : `${this.#data}\n${value}`;
    else if (name === "event" && this.#data === undefined) this.#name = value;
    return undefined;
  }

  #endEvent(): StreamedEvent | undefined {
    const [name, data] = [this.#name, this.#data];
    this.#name = "";
    this.#data = undefined;
    this.#lengthBytes = 0;
    return data === undefined || data === "" ? undefined : { name, data };
  }

  /** Whether the event is above the limit with these bytes of a line. */
  #isAbove(lengthBytes: number): boolean {
    if (this.#lengthBytes + this.#line.length + lengthBytes > this.#limitBytes)
      this.#problem ??= `sent an event of more than ${this.#limitBytes} bytes`;
    return this.#problem !== undefined;
  }

  #textOf(bytes: Buffer, from = 0, to = bytes.length): string {
    const text = bytes.toString("utf8", from, to);
    return this.#isFirstLine && text.startsWith(BOM) ? text.slice(BOM.length) : text;
  }
}

/** The bytes, not copied. */
export function asBuffer(bytes: Uint8Array): Buffer {
  return Buffer.isBuffer(bytes)
    ? bytes
    : Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

/** Position of the next CR or LF; -1 where there is none. */
function lineEnd(bytes: Buffer, from: number, hasCr: boolean): number {
  if (!hasCr) return bytes.indexOf(LF, from);
  for (let at = from; at < bytes.length; at += 1)
    if (bytes[at] === LF || bytes[at] === CR) return at;
  return -1;
}

/**
 * A line as field and value; one blank after the colon is no part of the value. A comment has an
 * empty name.
 */
export function fieldOf(line: string): { readonly name: string; readonly value: string } {
  const colon = line.indexOf(":");
  if (colon === -1) return { name: line, value: "" };
  return {
    name: line.slice(0, colon),
    value: line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1),
  };
}

/** As much as tells what an event is. */
const BEGIN_BYTES = 256;
/** The data of an error of vLLM's OpenAI API. In its Messages API, the event is named. */
const ERROR_DATA = /^\s*\{\s*"error"\s*:\s*[^\sn]/;
/** Data that may still become an error or `[DONE]`. */
const UNDECIDED = /^\s*(\{\s*("(e(r(r(o(r("\s*(:\s*)?)?)?)?)?)?)?)?|\[(D(O(N(E(\]\s*)?)?)?)?)?)?$/;

/** What a stream begins with. */
export type StreamBegin = "answer" | "error" | "done";

/** The begin of nearly every stream, which tells that it is an answer. */
const ANSWER_BEGIN = /^(?:event: (?!error\n)[\w.]+\n)?data: \{"(?!error")\w+"/;

/**
 * Finds out what the first event of a stream is, comments and events without data before it
 * skipped.
 */
export class FirstEvent {
  /** Of a stream whose first bytes do not tell it. */
  #reader: EventReader | undefined = undefined;
  readonly #limitBytes: number;
  #readBytes = 0;
  #kind: StreamBegin | undefined = undefined;
  #data = "";
  /** It is known at the end of the event. */
  #waitsForEnd = false;

  /** What `limitBytes` do not tell stays unknown. */
  constructor(limitBytes: number) {
    this.#limitBytes = limitBytes;
  }

  /**
   * Undefined while it is unknown. An error and `[DONE]` are known at their end, an answer from the
   * bytes that tell it from them.
   */
  get kind(): StreamBegin | undefined {
    return this.#kind;
  }

  /** The data of an error; else empty. */
  get data(): string {
    return this.#data;
  }

  /** Reads the next bytes. Returns whether more would tell nothing. */
  push(chunk: Uint8Array): boolean {
    const leftBytes = this.#limitBytes - this.#readBytes;
    if (this.#kind !== undefined || leftBytes === 0) return true;
    const bytes =
      chunk.length <= leftBytes ? asBuffer(chunk) : asBuffer(chunk).subarray(0, leftBytes);
    const isFirst = this.#readBytes === 0;
    this.#readBytes += bytes.length;
    if (isFirst && ANSWER_BEGIN.test(bytes.toString("latin1", 0, BEGIN_BYTES)))
      this.#kind = "answer";
    else {
      this.#reader ??= new EventReader(Number.POSITIVE_INFINITY);
      this.#take(this.#reader.push(bytes));
      if (this.#kind === undefined && !this.#waitsForEnd) this.#guess(this.#reader.begin());
    }
    return this.#kind !== undefined || bytes.length === leftBytes;
  }

  /** The stream has ended. */
  end(): void {
    if (this.#kind === undefined && this.#reader !== undefined) this.#take(this.#reader.end());
  }

  #take([first]: readonly StreamedEvent[]): void {
    if (first === undefined) return;
    if (isError(first)) {
      this.#kind = "error";
      this.#data = first.data;
    } else this.#kind = isDone(first.data) ? "done" : "answer";
  }

  #guess(begin: StreamedEvent): void {
    if (isError(begin)) this.#waitsForEnd = true;
    else if (!UNDECIDED.test(begin.data)) this.#kind = "answer";
    else this.#waitsForEnd = begin.data.length > BEGIN_BYTES;
  }
}

function isError({ name, data }: StreamedEvent): boolean {
  return name === "error" || ERROR_DATA.test(data);
}

/** An error in the first event of a stream, which the client can still get as an error. */
export interface StreamedError {
  /** The error's `code` where that is an HTTP status, else that of its type, else 502. */
  readonly status: number;
  readonly body: string;
}

/**
 * Reads the error that vLLM streams under status 200 for a failure before the first token.
 * Undefined where the data is none.
 */
export function streamedError(data: string): StreamedError | undefined {
  const body = data.trim();
  try {
    const { code, type } = JSON.parse(rawMember(body, "error") ?? "{}") as {
      code?: unknown;
      type?: unknown;
    };
    const isStatus =
      typeof code === "number" && Number.isInteger(code) && code >= 400 && code <= 599;
    return { status: isStatus ? code : (STATUS_OF_TYPE[String(type)] ?? 502), body };
  } catch {
    return undefined;
  }
}

/** HTTP statuses of the error types of the Messages API (vLLM 0.33, `translate_error_type`). */
const STATUS_OF_TYPE: Readonly<Record<string, number>> = {
  invalid_request_error: 400,
  authentication_error: 401,
  permission_error: 403,
  not_found_error: 404,
  request_too_large: 413,
  rate_limit_error: 429,
  api_error: 500,
  overloaded_error: 503,
};
