import type { ServerResponse } from "node:http";
import type { KvError, KvErrorCode } from "@kv/interface";

const STATUS: Partial<Record<KvErrorCode, number>> = {
  KV_REQUEST_INVALID: 400,
  // Of a server that answers, what an admin request says of an instance.
  KV_CONFIG_INVALID: 400,
  // Nobody is there to read it: the client went away. When the proxy is closing, `httpStatus` in the details says 503.
  KV_REQUEST_ABORTED: 499,
  KV_REQUEST_TIMEOUT: 504,
  KV_PROXY_UPSTREAM_FAILED: 502,
  KV_PROXY_NO_INSTANCE: 503,
};

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

/** An error in the form that OpenAI's clients read. */
export function errorBody(error: KvError, requestId?: string): string {
  const { param } = error.details;
  return JSON.stringify({
    error: {
      message: error.message,
      type: TYPES[statusOf(error)] ?? "server_error",
      param: typeof param === "string" ? param : null,
      code: error.code,
      ...(error.hint === undefined ? {} : { hint: error.hint }),
      ...(requestId === undefined ? {} : { request_id: requestId }),
    },
  });
}

export function sendError(response: ServerResponse, error: KvError, requestId?: string): void {
  writeError(response, error, requestId);
  response.end();
}

/** The whole answer, for a response that its caller ends. */
export function writeError(response: ServerResponse, error: KvError, requestId?: string): void {
  const body = errorBody(error, requestId);
  response.writeHead(statusOf(error), {
    "content-type": "application/json",
    "content-length": Buffer.byteLength(body),
    ...(requestId === undefined ? {} : { "x-request-id": requestId }),
  });
  response.write(body);
}
