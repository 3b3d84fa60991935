import type { KvError } from "@kv/interface";
import type { Endpoint } from "./endpoint.js";
import { errorBody } from "./error-answer.js";
import { rawMember } from "./json-members.js";

export function isEventStream(contentType: string | string[] | undefined): boolean {
  return typeof contentType === "string" && contentType.toLowerCase().startsWith("text/event-stream");
}

const ERROR_BEGIN = /^data: ?\{\s*"error"\s*:/;
const DONE_BEGIN = /^data: ?\[DONE\]/;
/** What may still become one of the two. */
const UNDECIDED = /^(d|da|dat|data|data: ?(\{\s*("(e|er|err|erro|error)?"?\s*)?|\[(D|DO|DON|DONE)?)?)$/;

/** Enough of a stream has come to know whether it begins with an error, or with its end. Comments are not a begin. */
export function beginIsKnown(bytes: Buffer): boolean {
  const at = firstField(bytes);
  const text = beginOf(bytes, at);
  if (text === "" || UNDECIDED.test(text)) return false;
  return !ERROR_BEGIN.test(text) || endOfEvent(bytes, at) !== -1;
}

/** A stream whose first event is its end answers nothing. */
export function beginsWithDone(bytes: Buffer): boolean {
  return DONE_BEGIN.test(beginOf(bytes, firstField(bytes)));
}

/**
 * vLLM streams a failure that comes before the first token as `data: {"error": …}` under status 200. While nothing has left it
 * can still be told as what it is. The status is the event's own code where that is one.
 */
export function firstEventError(bytes: Buffer): { status: number; body: string } | undefined {
  const at = firstField(bytes);
  if (!ERROR_BEGIN.test(beginOf(bytes, at))) return undefined;
  const end = endOfEvent(bytes, at);
  const event = bytes.toString("utf8", at, end === -1 ? bytes.length : end);
  const body = event.slice("data:".length).trim();
  try {
    const { code } = JSON.parse(rawMember(body, "error") ?? "{}") as { code?: unknown };
    const isStatus = typeof code === "number" && Number.isInteger(code) && code >= 400 && code <= 599;
    return { status: isStatus ? code : 502, body };
  } catch {
    return undefined;
  }
}

const LF = 0x0a;
const CR = 0x0d;
const COLON = 0x3a;

/** Where the first line begins that is neither blank nor a comment; the length where none has begun. */
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

/** Lines end with LF or CRLF, as in whatever sends events here. */
function endOfEvent(bytes: Buffer, from: number): number {
  const [lf, crlf] = [bytes.indexOf("\n\n", from), bytes.indexOf("\r\n\r\n", from)];
  return lf === -1 || crlf === -1 ? Math.max(lf, crlf) : Math.min(lf, crlf);
}

const LAST_EVENT = {
  "/v1/completions": /(^|\n)data: ?\[DONE\]\s*$/,
  "/v1/chat/completions": /(^|\n)data: ?\[DONE\]\s*$/,
  // It may be long: it repeats the whole response. So its name is looked for as it goes by.
  "/v1/responses": /(^|\n)event: ?response\.(completed|incomplete|failed)\r?\n/,
} as const satisfies Record<Endpoint, RegExp>;

const CHOICE = /"choices"\s*:\s*\[\s*\{/;
const ERROR_EVENT = /(^|\n)data: ?\{\s*"error"\s*:\s*[^\sn]/;

const TAIL_BYTES = 64;

/** Looks at a stream as it goes by, byte for byte. */
export interface StreamWatch {
  push(chunk: Uint8Array): void;
  /** The event that ends a stream of the endpoint was the last: one that just stops was cut off. */
  complete(): boolean;
  /** An event held a choice, or the endpoint has none. A quote inside of a string is escaped, so a text cannot look like one. */
  answered(): boolean;
  /** The instance told of a failure in an event of its own. */
  failed(): boolean;
}

export function createStreamWatch(endpoint: Endpoint): StreamWatch {
  const last = LAST_EVENT[endpoint];
  const named = endpoint === "/v1/responses";
  let tail: Buffer = Buffer.alloc(0);
  let seen = false;
  let answered = named;
  let failed = false;
  return {
    push(chunk) {
      const bytes = Buffer.concat([tail, chunk]);
      if (named && !seen) seen = last.test(bytes.toString("latin1"));
      answered ||= CHOICE.test(bytes.toString("latin1"));
      if (!failed && bytes.includes('"error"')) failed = ERROR_EVENT.test(bytes.toString("latin1"));
      tail = bytes.subarray(-TAIL_BYTES);
    },
    complete: () => {
      const text = tail.toString("latin1");
      return named ? seen && /\n\r?\n$/.test(text) : last.test(text);
    },
    answered: () => answered,
    failed: () => failed,
  };
}

/** The event that tells a client of a failure in mid-stream. The blank line ends an event that was cut. */
export function errorEvent(error: KvError, requestId?: string): string {
  return `\n\ndata: ${errorBody(error, requestId)}\n\n`;
}
