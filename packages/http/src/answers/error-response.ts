import { type IncomingMessage, type ServerResponse, STATUS_CODES } from "node:http";
import type { Socket } from "node:net";
import { type Clock, KvError } from "@kv/interface";
import { type ErrorForm, errorBody, statusOf } from "./client-error.js";

/** An error as it is answered. */
export interface ErrorAnswer {
  /** The HTTP status. */
  readonly status: number;
  /** Besides those of the body, in lower case. */
  readonly headers: Readonly<Record<string, string>>;
  /** JSON. */
  readonly body: string;
}

/** An error in the form of OpenAI's API, or of Anthropic's. */
export function errorAnswer(error: KvError, requestId?: string, form?: ErrorForm): ErrorAnswer {
  const { retryAfterSeconds, allow } = error.details;
  const headers: Record<string, string> = {};
  if (typeof retryAfterSeconds === "number") headers["retry-after"] = String(retryAfterSeconds);
  if (typeof allow === "string") headers["allow"] = allow;
  if (requestId !== undefined) headers["x-request-id"] = requestId;
  return { status: statusOf(error), headers, body: errorBody(error, requestId, form) };
}

/**
 * The event that reports a failure in the middle of a stream. Its blank line ends an event that was
 * cut off.
 */
export function errorEvent(error: KvError, requestId?: string, form: ErrorForm = "openai"): string {
  const name = form === "anthropic" ? "event: error\n" : "";
  return `\n\n${name}data: ${errorBody(error, requestId, form)}\n\n`;
}

/** Answers with an error. */
export function sendError(
  response: ServerResponse,
  error: KvError,
  requestId?: string,
  form?: ErrorForm,
): void {
  writeError(response, errorAnswer(error, requestId, form));
  response.end();
}

/** Writes an answer, and does not end it. */
export function writeError(response: ServerResponse, { status, headers, body }: ErrorAnswer): void {
  response.writeHead(status, { ...headers, ...headersOf(body) });
  response.write(body);
}

const headersOf = (body: string) => ({
  "content-type": "application/json",
  "content-length": String(Buffer.byteLength(body)),
});

/** How long a client whose request was refused may go on sending. */
const DROP_MS = 30_000;

/** How long a client may take to read the last answer of its connection, and to close it. */
const LINGER_MS = 2_000;

/**
 * Closes a connection after its last answer. A client that does not close its side would keep the
 * descriptor, so it has a limited time.
 */
function destroyLater(socket: Socket, clock: Clock): void {
  const timer = clock.setTimer(() => socket.destroy(), LINGER_MS);
  socket.once("close", () => timer.cancel());
}

/**
 * Answers a request with an error before all of it has arrived. A connection that is closed with
 * unread bytes is reset, and a client that is still sending sees the reset in place of the answer.
 * So the rest of the request is read and dropped first, to its end or for 30 s. At a limit of all
 * requests nothing more is read, and the client has 2 s to see the answer.
 */
export function sendEarlyError(
  request: IncomingMessage,
  response: ServerResponse,
  error: KvError,
  answer: ErrorAnswer,
  clock: Clock,
): void {
  // The rest of the body would be parsed as the next request.
  response.setHeader("connection", "close");
  writeError(response, answer);
  const { socket } = request;
  if (error.code === "KV_PROXY_OVERLOADED") {
    // Reading the rest would cost the time that others need.
    request.pause();
    destroyLater(socket, clock);
    return;
  }
  let ended = false;
  const end = () => {
    if (ended) return;
    ended = true;
    timer.cancel();
    response.end();
    if (!socket.destroyed) destroyLater(socket, clock);
  };
  const timer = clock.setTimer(end, DROP_MS);
  request.once("close", end);
  request.resume();
}

const PARSER_ERRORS: Readonly<Record<string, readonly [number, string]>> = {
  HPE_CHUNK_EXTENSIONS_OVERFLOW: [413, "the extensions of a chunk are too long"],
  HPE_HEADER_OVERFLOW: [431, "the headers are larger than limits.headersLengthBytes"],
  ERR_HTTP_REQUEST_TIMEOUT: [408, "the request took too long to arrive"],
};

/** Answers an error of Node's HTTP parser, which has a socket and no request. */
export function sendParserError(
  error: Error & { code?: string },
  socket: Socket,
  answerError: (error: KvError) => ErrorAnswer,
  clock: Clock,
): void {
  if (error.code === "ECONNRESET" || !socket.writable) {
    socket.destroy();
    return;
  }
  const [httpStatus, message] = PARSER_ERRORS[error.code ?? ""] ?? [400, "this is not HTTP/1.1"];
  endWithAnswer(
    socket,
    answerError(new KvError("KV_REQUEST_INVALID", message, { details: { httpStatus } })),
  );
  destroyLater(socket, clock);
}

/** Ends a connection that is above a limit: with the answer where `canAnswer`, and at once. */
export function refuseConnection(socket: Socket, answer: ErrorAnswer, canAnswer: boolean): void {
  socket.on("error", () => {});
  // The kernel takes these few bytes at once, and nothing more of a flood is read.
  if (canAnswer && socket.writable) endWithAnswer(socket, answer);
  socket.destroy();
}

/** Writes an answer without a `ServerResponse`, and ends the connection's writable side. */
function endWithAnswer(socket: Socket, { status, headers, body }: ErrorAnswer): void {
  const lines = Object.entries({ ...headers, ...headersOf(body), connection: "close" });
  socket.end(
    `HTTP/1.1 ${status} ${STATUS_CODES[status] ?? ""}\r\n` +
      `${lines.map(([name, value]) => `${name}: ${value}\r\n`).join("")}\r\n${body}`,
  );
}
