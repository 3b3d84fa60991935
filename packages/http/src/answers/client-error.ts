import { KvError, type KvErrorCode } from "@kv/interface";

const STATUS: Partial<Record<KvErrorCode, number>> = {
  KV_REQUEST_INVALID: 400,
  // An admin request named an instance that is not valid.
  KV_CONFIG_INVALID: 400,
  // The client has disconnected and does not read it. When the proxy is closing, `httpStatus` in
  // the details is 503.
  KV_REQUEST_ABORTED: 499,
  KV_REQUEST_TIMEOUT: 504,
  KV_PROXY_UPSTREAM_FAILED: 502,
  KV_PROXY_NO_INSTANCE: 503,
  KV_PROXY_OVERLOADED: 503,
};

/** The HTTP status of an error: `details.httpStatus`, else by its code. */
export function statusOf(error: KvError): number {
  const { httpStatus } = error.details;
  return typeof httpStatus === "number" ? httpStatus : (STATUS[error.code] ?? 500);
}

const TYPES: Readonly<Record<number, string>> = {
  400: "invalid_request_error",
  401: "invalid_request_error",
  404: "invalid_request_error",
  405: "invalid_request_error",
  409: "invalid_request_error",
  413: "invalid_request_error",
  403: "invalid_request_error",
  415: "invalid_request_error",
  429: "rate_limit_error",
  431: "invalid_request_error",
};

/**
 * Which API an error is written for. Anthropic's has a `type` beside `error`, and other names of
 * server errors.
 */
export type ErrorForm = "openai" | "anthropic";

/** JSON text of an error, with the members that both APIs share. */
export function errorBody(error: KvError, requestId?: string, form: ErrorForm = "openai"): string {
  const { param } = error.details;
  const status = statusOf(error);
  const serverError =
    form === "openai" ? "server_error" : status === 503 ? "overloaded_error" : "api_error";
  return JSON.stringify({
    type: form === "anthropic" ? "error" : undefined,
    error: {
      message: error.message,
      type: TYPES[status] ?? serverError,
      param: typeof param === "string" ? param : null,
      code: error.code,
      hint: error.hint,
      request_id: requestId,
    },
  });
}

/** Codes of errors that the client has not caused. Their messages may name instances. */
const INTERNAL: ReadonlySet<KvErrorCode> = new Set([
  "KV_PROXY_UPSTREAM_FAILED",
  "KV_PROXY_NO_INSTANCE",
  "KV_REQUEST_TIMEOUT",
  "KV_LEASE_EXPIRED",
  "KV_INTERNAL",
]);

const ADDRESS =
  / ?(\bhttps?:\/\/[^\s"'(),;]+|(?<![\w.])(\d{1,3}\.){3}\d{1,3}(:\d+)?|\[[0-9a-f:]*:[0-9a-f:.]*\](:\d+)?)/gi;

/** A text without URLs and IP addresses. */
export function withoutAddresses(text: string): string {
  return text.replace(ADDRESS, "");
}

/**
 * An error as clients get it: without the addresses of instances, unless `exposeInstances`. The log
 * has the whole error.
 */
export function errorForClient(error: KvError, exposeInstances: boolean): KvError {
  if (exposeInstances || !INTERNAL.has(error.code)) return error;
  const { httpStatus, param } = error.details;
  const { hint } = error;
  const named = hint !== undefined && withoutAddresses(hint) !== hint;
  return new KvError(error.code, withoutAddresses(error.message), {
    hint: named ? "the proxy's log names the instance, under the request id" : hint,
    details: { httpStatus, param },
  });
}
