import { StringDecoder } from "node:string_decoder";
import type { Endpoint } from "@kv/fleet/front-end";
import { KvError } from "@kv/interface";
import { rawMember } from "../request/json-members.js";

/** Whether a `content-type` is that of server-sent events. */
export function isEventStream(contentType: string | string[] | undefined): boolean {
  return typeof contentType === "string" && contentType.toLowerCase().startsWith("text/event-stream");
}

/** The begin of an error: vLLM's in its OpenAI API, or the named event of its Messages API. */
const ERROR_BEGIN = /^(data: ?\{\s*"error"\s*:|event: ?error\r?\n)/;
const DONE_BEGIN = /^data: ?\[DONE\]/;
/** The begin of a stream that may still become one of the two. */
const UNDECIDED =
  /^(e|ev|eve|even|event|event: ?(e|er|err|erro|error\r?)?|d|da|dat|data|data: ?(\{\s*("(e|er|err|erro|error)?"?\s*)?|\[(D|DO|DON|DONE)?)?)$/;

/** Whether enough of a stream is there to know if its first event is an error or `[DONE]`. Comments before it are skipped. */
export function firstEventIsKnown(bytes: Buffer): boolean {
  const at = firstField(bytes);
  const text = beginOf(bytes, at);
  if (text === "" || UNDECIDED.test(text)) return false;
  return !ERROR_BEGIN.test(text) || endOfEvent(bytes, at) !== -1;
}

/** Whether the first event is `[DONE]`: such a stream has no answer. */
export function beginsWithDone(bytes: Buffer): boolean {
  return DONE_BEGIN.test(beginOf(bytes, firstField(bytes)));
}

/**
 * The error in the first event of a stream; undefined where there is none. vLLM streams a failure before the first token as
 * `data: {"error": …}` under status 200; the client can still get it as an error. The status is the event's `code` where that is an HTTP
 * status, else 502.
 */
export function firstEventError(bytes: Buffer): { status: number; body: string } | undefined {
  const at = firstField(bytes);
  if (!ERROR_BEGIN.test(beginOf(bytes, at))) return undefined;
  const end = endOfEvent(bytes, at);
  const event = bytes.toString("utf8", at, end === -1 ? bytes.length : end);
  const body = dataOf(event).trim();
  try {
    const { code, type } = JSON.parse(rawMember(body, "error") ?? "{}") as { code?: unknown; type?: unknown };
    const isStatus = typeof code === "number" && Number.isInteger(code) && code >= 400 && code <= 599;
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

const LF = 0x0a;
const CR = 0x0d;
const COLON = 0x3a;

/** Position of the first line that is neither blank nor a comment; the length where there is none. */
function firstField(bytes: Buffer): number {
  let at = 0;
  for (;;) {
    const byte = bytes[at];
    if (byte === LF || byte === CR) at += 1;
    else if (byte === COLON) {
      const end = bytes.indexOf(LF, at);
      if (end === -1) return bytes.length;
      at = end + 1;
    } else return at;
  }
}

function beginOf(bytes: Buffer, at: number): string {
  return bytes.toString("latin1", at, at + 64);
}

/** Position of the blank line that ends an event; -1 where it has not come. Lines end with LF or CRLF. */
function endOfEvent(bytes: Buffer, from: number): number {
  const [lf, crlf] = [bytes.indexOf("\n\n", from), bytes.indexOf("\r\n\r\n", from)];
  return lf === -1 || crlf === -1 ? Math.max(lf, crlf) : Math.min(lf, crlf);
}

const LAST_EVENT = {
  "/v1/completions": /(^|\n)data: ?\[DONE\]\s*$/,
  "/v1/chat/completions": /(^|\n)data: ?\[DONE\]\s*$/,
  // The event may be long, as it repeats the whole response. So its name is searched for as the stream passes.
  "/v1/responses": /(^|\n)event: ?response\.(completed|incomplete|failed)\r?\n/,
  "/v1/messages": /(^|\n)event: ?(message_stop|error)\r?\n/,
} as const satisfies Record<Endpoint, RegExp>;

/** The last event of a completion, with whatever follows it. */
const AFTER_DONE = /(?:^|\n)data: ?\[DONE\]\r?\n\r?\n([\s\S]*)$/;
/** What may follow the last event: blank lines and comments. */
const NOTHING_MORE = /^(\r?\n|:[^\n]*(\n|$))*$/;
/** A choice with another index than 0, as vLLM writes it. */
const OTHER_CHOICE = /"choices"\s*:\s*\[\s*\{\s*"index"\s*:\s*(?!0[\s,}])[^\s]/;

const CHOICE = /"choices"\s*:\s*\[\s*\{/;
const ERROR_EVENT = /(^|\n)(data: ?\{\s*"error"\s*:\s*[^\sn]|event: ?error\r?\n)/;

const TAIL_BYTES = 64;

/** Watches an event stream as it passes, without changing it. */
export class StreamWatch {
  readonly #lastEvent: RegExp;
  /** The Responses and the Messages API end a stream with an event of a certain name, and have no choices. */
  readonly #named: boolean;
  /** The last bytes, one character each. */
  #tail = "";
  #lastEventSeen = false;
  readonly #onePart: boolean;
  #answered: boolean;
  #failed = false;
  #problem: string | undefined = undefined;

  /** `onePart`: the request had one prompt and one copy, so all choices have the index 0. */
  constructor(endpoint: Endpoint, onePart = true) {
    this.#lastEvent = LAST_EVENT[endpoint];
    this.#onePart = onePart;
    this.#named = endpoint === "/v1/responses" || endpoint === "/v1/messages";
    this.#answered = this.#named;
  }

  /** Whether an event had a choice; always true of the Responses and the Messages API. Quotes inside of strings are escaped, so text cannot match. */
  get answered(): boolean {
    return this.#answered;
  }

  /** Whether the instance reported a failure in an event of the stream. */
  get failed(): boolean {
    return this.#failed;
  }

  /** What is wrong with the stream, besides its end; undefined for nothing. */
  get problem(): string | undefined {
    return this.#problem;
  }

  /** Whether the last event was the one that ends a stream of the endpoint. A stream that stops without it was cut off. */
  get complete(): boolean {
    if (this.#problem !== undefined) return false;
    if (!this.#named) return this.#lastEventSeen;
    return this.#lastEventSeen && /\n\r?\n$/.test(this.#tail);
  }

  push(chunk: Uint8Array): void {
    if (chunk.byteLength === 0) return;
    const endedBefore = this.complete;
    const more = Buffer.from(chunk.buffer, chunk.byteOffset, chunk.byteLength).toString("latin1");
    const text = this.#tail + more;
    if (endedBefore && !NOTHING_MORE.test(more))
      this.#problem = "sent more after the last event of its stream";
    this.#tail = text.slice(-TAIL_BYTES);
    if (this.#named) this.#lastEventSeen ||= this.#lastEvent.test(text);
    else this.#inspectCompletion(text, endedBefore);
    if (!this.#answered) this.#answered = CHOICE.test(text);
    if (!this.#failed && text.includes("error")) this.#failed = ERROR_EVENT.test(text);
  }

  /** Looks for a choice that was not requested, and for the last event with whatever follows it. */
  #inspectCompletion(text: string, endedBefore: boolean): void {
    if (this.#onePart && OTHER_CHOICE.test(text))
      this.#problem = "streamed a choice with another index than 0";
    if (endedBefore || !text.includes("[DONE]")) return;
    const more = AFTER_DONE.exec(text)?.[1];
    if (more !== undefined && !NOTHING_MORE.test(more))
      this.#problem = "sent more after the last event of its stream";
    this.#lastEventSeen = more !== undefined || this.#lastEvent.test(text);
  }
}

/** Splits a stream of server-sent events into the data of each event. Comments and other fields are dropped. */
export class EventReader {
  readonly #limitBytes: number;
  readonly #decoder = new StringDecoder("utf8");
  #pending = "";

  constructor(limitBytes: number) {
    this.#limitBytes = limitBytes;
  }

  /** Returns the data of the events that the bytes complete. Errors: `KV_PROXY_UPSTREAM_FAILED` for an event above the limit. */
  push(bytes: Uint8Array): string[] {
    this.#pending += this.#decoder.write(Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength));
    const events = this.#pending.split(/\r?\n\r?\n/);
    this.#pending = events.pop() ?? "";
    if (this.#pending.length > this.#limitBytes)
      throw new KvError("KV_PROXY_UPSTREAM_FAILED", `an event is longer than ${this.#limitBytes} bytes`);
    return events.map(dataOf).filter((data) => data !== "");
  }
}

function dataOf(event: string): string {
  return event
    .split(/\r?\n/)
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(line.startsWith("data: ") ? 6 : 5))
    .join("\n");
}
