import { type IncomingMessage, type ServerResponse, STATUS_CODES } from "node:http";
import type { Socket } from "node:net";
import type { Clock, KvError } from "@kv/interface";
import { type ErrorForm, errorBody, refusedRequest, statusOf } from "./client-error.js";

/** The HTTP answer for an error. */
export interface ErrorAnswer {
  readonly status: number;
  /** In lower case, without those of the body. */
  readonly headers: Readonly<Record<string, string>>;
  readonly body: string;
}

/** The answer for an error, in the form of OpenAI's or Anthropic's API. */
export function errorAnswer(error: KvError, requestId?: string, form?: ErrorForm): ErrorAnswer {
  const { retryAfterSeconds, allow } = error.details;
  const headers: Record<string, string> = {};
  if (typeof retryAfterSeconds === "number") headers["retry-after"] = String(retryAfterSeconds);
  if (typeof allow === "string") headers["allow"] = allow;
  if (requestId !== undefined) headers["x-request-id"] = requestId;
  return { status: statusOf(error), headers, body: errorBody(error, requestId, form) };
}

/** An error as an event of a stream. Its blank line ends an event that was cut off. */
export function errorEvent(error: KvError, requestId?: string, form: ErrorForm = "openai"): string {
  const name = form === "anthropic" ? "event: error\n" : "";
  return `\n\n${name}data: ${errorBody(error, requestId, form)}\n\n`;
}

/** Answers a request with an error. */
export function sendError(
  response: ServerResponse,
  error: KvError,
  requestId?: string,
  form?: ErrorForm,
): void {
  writeError(response, errorAnswer(error, requestId, form));
  response.end();
}

export function writeError(response: ServerResponse, { status, headers, body }: ErrorAnswer): void {
  response.writeHead(status, { ...headers, ...headersOf(body) });
  response.write(body);
}

const headersOf = (body: string) => ({
  "content-type": "application/json",
  "content-length": String(Buffer.byteLength(body)),
});

/** How long a refused client may go on sending. */
const DROP_MS = 30_000;

/** How long a client may take to read its last answer. */
const LINGER_MS = 2_000;

/** A client that keeps its side open would hold the descriptor. */
function destroyLater(socket: Socket, clock: Clock): void {
  const timer = clock.setTimer(() => socket.destroy(), LINGER_MS);
  socket.once("close", () => timer.cancel());
}

/**
 * Answers with an error before the whole request has arrived. The rest is read for up to 30 s and
 * dropped, since closing with unread bytes would reset the connection and lose the answer. At a
 * limit of all requests nothing more is read, and the client has 2 s to read the answer.
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
    // Reading would take time from other requests.
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
  endWithAnswer(socket, answerError(refusedRequest(httpStatus, message)));
  destroyLater(socket, clock);
}

/** Ends a connection at once, with the answer if `canAnswer`. */
export function refuseConnection(socket: Socket, answer: ErrorAnswer, canAnswer: boolean): void {
  socket.on("error", () => {});
  // The kernel takes these bytes at once. A flood is not read.
  if (canAnswer && socket.writable) endWithAnswer(socket, answer);
  socket.destroy();
}

function endWithAnswer(socket: Socket, { status, headers, body }: ErrorAnswer): void {
  const lines = Object.entries({ ...headers, ...headersOf(body), connection: "close" });
  socket.end(
    `HTTP/1.1 ${status} ${STATUS_CODES[status] ?? ""}\r\n` +
      `${lines.map(([name, value]) => `${name}: ${value}\r\n`).join("")}\r\n${body}`,
  );
}
