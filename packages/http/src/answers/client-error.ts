import { KvError, type KvErrorCode } from "@kv/interface";

const STATUS: Partial<Record<KvErrorCode, number>> = {
  KV_REQUEST_INVALID: 400,
  KV_CONFIG_INVALID: 400,
  // Nobody reads it, unless the proxy closes: then `details.httpStatus` is 503.
  KV_REQUEST_ABORTED: 499,
  KV_REQUEST_TIMEOUT: 504,
  KV_PROXY_UPSTREAM_FAILED: 502,
  KV_PROXY_NO_INSTANCE: 503,
  KV_PROXY_OVERLOADED: 503,
};

/** The HTTP status: `details.httpStatus`, else by the error's code. */
export function statusOf(error: KvError): number {
  const { httpStatus } = error.details;
  return typeof httpStatus === "number" ? httpStatus : (STATUS[error.code] ?? 500);
}

/** The API that an error is written for. */
export type ErrorForm = "openai" | "anthropic";

/** An error as JSON text, with the members that both APIs share. */
export function errorBody(error: KvError, requestId?: string, form: ErrorForm = "openai"): string {
  const { param } = error.details;
  const status = statusOf(error);
  return JSON.stringify({
    type: form === "anthropic" ? "error" : undefined,
    error: {
      message: error.message,
      type: typeOf(status, form),
      param: typeof param === "string" ? param : null,
      code: error.code,
      hint: error.hint,
      request_id: requestId,
    },
  });
}

function typeOf(status: number, form: ErrorForm): string {
  if (status === 429) return "rate_limit_error";
  if (status < 500) return "invalid_request_error";
  if (form === "openai") return "server_error";
  return status === 503 ? "overloaded_error" : "api_error";
}

/** No client causes these. Their messages may name instances. */
const INTERNAL: ReadonlySet<KvErrorCode> = new Set([
  "KV_PROXY_UPSTREAM_FAILED",
  "KV_PROXY_NO_INSTANCE",
  "KV_REQUEST_TIMEOUT",
  "KV_LEASE_EXPIRED",
  "KV_INTERNAL",
]);

const ADDRESS =
  / ?(\bhttps?:\/\/[^\s"'(),;]+|(?<![\w.])(\d{1,3}\.){3}\d{1,3}(:\d+)?|\[[0-9a-f:]*:[0-9a-f:.]*\](:\d+)?)/gi;

/** Removes URLs and IP addresses from a text. */
export function withoutAddresses(text: string): string {
  return text.replace(ADDRESS, "");
}

/** An error as clients get it: without addresses of instances, unless `exposeInstances`. */
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

/** The error for a request that is refused with this status. */
export function refusedRequest(
  httpStatus: number,
  message: string,
  hint?: string,
  details?: Readonly<Record<string, unknown>>,
): KvError {
  return new KvError("KV_REQUEST_INVALID", message, { hint, details: { httpStatus, ...details } });
}

/** The limit at which a request or a connection is refused. */
export interface Overload {
  /** The setting, such as `limits.connections`. */
  readonly limit: string;
  readonly message: string;
  /** Whether one client (429) or all together (503) reached it. */
  readonly byClient: boolean;
  readonly retryAfterSeconds?: number | undefined;
  /** What the client or operator can do. */
  readonly hint?: string | undefined;
}

/** The error for a limit that is reached: 429 or 503, with `Retry-After`. */
export function overloaded({
  limit,
  message,
  byClient,
  retryAfterSeconds = 1,
  hint,
}: Overload): KvError {
  return new KvError("KV_PROXY_OVERLOADED", message, {
    hint: hint ?? `try again in ${retryAfterSeconds} s; the limit is ${limit}`,
    details: { httpStatus: byClient ? 429 : 503, retryAfterSeconds, limit },
  });
}

const MAX_CHARACTERS = 60;

/** A client's value for an error message: short, without nested values. */
export function shownValue(value: unknown): string {
  if (Array.isArray(value)) return "a list";
  if (typeof value === "object" && value !== null) return "an object";
  if (typeof value !== "string") return String(value);
  return JSON.stringify(shortened(value));
}

/** The first 60 characters of a text. */
export function shortened(text: string): string {
  return text.length <= MAX_CHARACTERS ? text : `${text.slice(0, MAX_CHARACTERS)}…`;
}
