import type { KvError } from "@kv/interface";
import type { Endpoint } from "./endpoint.js";
import { errorBody } from "./error-answer.js";
import { rawMember } from "./json-members.js";

export function isEventStream(contentType: string | string[] | undefined): boolean {
  return typeof contentType === "string" && contentType.toLowerCase().startsWith("text/event-stream");
}

const ERROR_BEGIN = /^data: ?\{\s*"error"\s*:/;

/** Enough of a stream has come to know whether it begins with an error. */
export function beginIsKnown(bytes: Buffer): boolean {
  return !beginsWithError(bytes) || bytes.includes("\n\n");
}

function beginsWithError(bytes: Buffer): boolean {
  return ERROR_BEGIN.test(bytes.toString("latin1", 0, 64));
}

/**
 * vLLM streams a failure that comes before the first token as `data: {"error": …}` under status 200. While nothing has left it
 * can still be told as what it is. The status is the event's own code where that is one.
 */
export function firstEventError(bytes: Buffer): { status: number; body: string } | undefined {
  if (!beginsWithError(bytes)) return undefined;
  const end = bytes.indexOf("\n\n");
  const event = bytes.toString("utf8", 0, end === -1 ? bytes.length : end);
  const body = event.slice("data:".length).trim();
  try {
    const { code } = JSON.parse(rawMember(body, "error") ?? "{}") as { code?: unknown };
    const isStatus = typeof code === "number" && Number.isInteger(code) && code >= 400 && code <= 599;
    return { status: isStatus ? code : 502, body };
  } catch {
    return undefined;
  }
}

const LAST_EVENT = {
  "/v1/completions": /(^|\n)data: ?\[DONE\]\s*$/,
  "/v1/chat/completions": /(^|\n)data: ?\[DONE\]\s*$/,
  // It may be long: it repeats the whole response. So its name is looked for as it goes by.
  "/v1/responses": /(^|\n)event: ?response\.(completed|incomplete|failed)\r?\n/,
} as const satisfies Record<Endpoint, RegExp>;

const TAIL_BYTES = 64;

/** Watches for the event that ends a stream of an endpoint: one that just stops was cut off. */
export function createEndWatch(endpoint: Endpoint): { push(chunk: Uint8Array): void; complete(): boolean } {
  const last = LAST_EVENT[endpoint];
  const named = endpoint === "/v1/responses";
  let tail: Uint8Array = Buffer.alloc(0);
  let seen = false;
  return {
    push(chunk) {
      if (named) seen ||= last.test(Buffer.concat([tail.subarray(-TAIL_BYTES), chunk]).toString("latin1"));
      tail = chunk.byteLength >= TAIL_BYTES ? chunk : Buffer.concat([tail, chunk]).subarray(-TAIL_BYTES);
    },
    complete: () => {
      const text = Buffer.from(tail.subarray(-TAIL_BYTES)).toString("latin1");
      return named ? seen && /\n\r?\n$/.test(text) : last.test(text);
    },
  };
}

/** The event that tells a client of a failure in mid-stream. The blank line ends an event that was cut. */
export function errorEvent(error: KvError, requestId?: string): string {
  return `\n\ndata: ${errorBody(error, requestId)}\n\n`;
}
