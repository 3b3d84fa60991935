import type { Socket } from "node:net";
import { KvError } from "@kv/interface";
import { errorBody } from "./error-answer.js";

/** What fastify found wrong with an admin request before any route saw it, as an error of ours with its HTTP status. */
export function fromFastify(thrown: unknown, bodyLimitBytes: number): KvError {
  if (KvError.is(thrown)) return thrown;
  const { statusCode, code, message } = thrown as { statusCode?: number; code?: string; message?: string };
  const httpStatus = statusCode ?? 500;
  const details = { httpStatus, reason: code };
  if (httpStatus === 413) {
    const message = `the body is larger than the ${bodyLimitBytes} bytes that an admin route takes`;
    return new KvError("KV_REQUEST_INVALID", message, { hint: "send one instance at a time", details });
  }
  if (httpStatus === 415) {
    const hint = "send content-type: application/json";
    return new KvError("KV_REQUEST_INVALID", "the body's content type is not JSON", { hint, details });
  }
  if (httpStatus >= 500) {
    return new KvError("KV_INTERNAL", message ?? "the proxy failed", { details, cause: thrown });
  }
  return new KvError("KV_REQUEST_INVALID", message ?? "the request cannot be read", {
    details,
    cause: thrown,
  });
}

const PARSER_ERRORS: Readonly<Record<string, readonly [number, string, string]>> = {
  HPE_HEADER_OVERFLOW: [
    431,
    "Request Header Fields Too Large",
    "the headers are larger than the proxy's limit",
  ],
  ERR_HTTP_REQUEST_TIMEOUT: [408, "Request Timeout", "the request took too long to arrive"],
};

/** Answers what Node's HTTP parser refused; there is a socket, and no request yet. */
export function answerParserError(error: Error & { code?: string }, socket: Socket): void {
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
