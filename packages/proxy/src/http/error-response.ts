import type { IncomingMessage, ServerResponse } from "node:http";
import type { Socket } from "node:net";
import { type Clock, KvError, type KvErrorCode } from "@kv/interface";

const STATUS: Partial<Record<KvErrorCode, number>> = {
  KV_REQUEST_INVALID: 400,
  // An admin request named an instance that is not valid.
  KV_CONFIG_INVALID: 400,
  // The client has disconnected and does not read it. When the proxy is closing, `httpStatus` in the details is 503.
  KV_REQUEST_ABORTED: 499,
  KV_REQUEST_TIMEOUT: 504,
  KV_PROXY_UPSTREAM_FAILED: 502,
  KV_PROXY_NO_INSTANCE: 503,
};

/** The HTTP status of an error: `details.httpStatus`, else by its code. */
export function statusOf(error: KvError): number {
  const { httpStatus } = error.details;
  return typeof httpStatus === "number" ? httpStatus : (STATUS[error.code] ?? 500);
}

const TYPES: Readonly<Record<number, string>> = {
  400: "invalid_request_error",
  404: "invalid_request_error",
  413: "invalid_request_error",
  415: "invalid_request_error",
  431: "invalid_request_error",
};

/** JSON text of an error in OpenAI's form. */
export function errorBody(error: KvError, requestId?: string): string {
  const { param } = error.details;
  return JSON.stringify({
    error: {
      message: error.message,
      type: TYPES[statusOf(error)] ?? "server_error",
      param: typeof param === "string" ? param : null,
      code: error.code,
      hint: error.hint,
      request_id: requestId,
    },
  });
}

/** The event that reports a failure in the middle of a stream. Its blank line ends an event that was cut off. */
export function errorEvent(error: KvError, requestId?: string): string {
  return `\n\ndata: ${errorBody(error, requestId)}\n\n`;
}

/** Answers with an error. */
export function sendError(response: ServerResponse, error: KvError, requestId?: string): void {
  writeError(response, error, requestId);
  response.end();
}

function writeError(response: ServerResponse, error: KvError, requestId?: string): void {
  const body = errorBody(error, requestId);
  response.writeHead(statusOf(error), {
    "content-type": "application/json",
    "content-length": Buffer.byteLength(body),
    ...(requestId === undefined ? {} : { "x-request-id": requestId }),
  });
  response.write(body);
}

/** How long a client whose request was refused may go on sending. */
const DROP_MS = 30_000;

/**
 * Answers a request with an error before all of it has arrived. A connection that is closed with unread bytes is reset, and a client that is
 * still sending sees the reset in place of the answer. So the rest of the request is read and dropped first, to its end or for 30 s.
 */
export function sendEarlyError(
  request: IncomingMessage,
  response: ServerResponse,
  error: KvError,
  clock: Clock,
): void {
  // The rest of the body would be parsed as the next request.
  response.setHeader("connection", "close");
  writeError(response, error);
  const end = () => {
    timer.cancel();
    response.end();
  };
  const timer = clock.setTimer(end, DROP_MS);
  request.once("close", end);
  request.resume();
}

const PARSER_ERRORS: Readonly<Record<string, readonly [number, string, string]>> = {
  HPE_HEADER_OVERFLOW: [
    431,
    "Request Header Fields Too Large",
    "the headers are larger than limits.headersLengthBytes",
  ],
  ERR_HTTP_REQUEST_TIMEOUT: [408, "Request Timeout", "the request took too long to arrive"],
};

/** Answers an error of Node's HTTP parser, which has a socket and no request. */
export function sendParserError(error: Error & { code?: string }, socket: Socket): void {
  if (error.code === "ECONNRESET" || !socket.writable) {
    socket.destroy();
    return;
  }
  const [status, phrase, message] = PARSER_ERRORS[error.code ?? ""] ?? [
    400,
    "Bad Request",
    "this is not HTTP/1.1",
  ];
  const body = errorBody(new KvError("KV_REQUEST_INVALID", message, { details: { httpStatus: status } }));
  socket.end(
    `HTTP/1.1 ${status} ${phrase}\r\ncontent-type: application/json\r\n` +
      `content-length: ${Buffer.byteLength(body)}\r\nconnection: close\r\n\r\n${body}`,
  );
}
