import { KvError, type KvErrorCode } from "@kv/interface";

const STATUS: Partial<Record<KvErrorCode, number>> = {
  KV_REQUEST_INVALID: 400,
  KV_OUT_OF_BLOCKS: 400,
  KV_REFERENCE_USED: 400,
  KV_PROMPT_MISMATCH: 400,
  KV_REFERENCES_FULL: 503,
  KV_REQUEST_ABORTED: 499,
};

export function httpError(httpStatus: number, message: string, param?: string): KvError {
  return new KvError("KV_REQUEST_INVALID", message, { details: { httpStatus, param } });
}

/**
 * The HTTP status of an error: `details.httpStatus`, else the status of its code, else 500. What
 * one client has too much of is 503 too: the proxy then tries another instance.
 */
export function statusOf(error: KvError): number {
  const { httpStatus } = error.details;
  if (httpStatus === 429) return 503;
  return typeof httpStatus === "number" ? httpStatus : (STATUS[error.code] ?? 500);
}

export function errorBody(error: KvError): { error: Record<string, unknown> } {
  const { param, limit } = error.details;
  return {
    error: {
      message: error.message,
      type: statusOf(error) < 500 ? "invalid_request_error" : "server_error",
      param: typeof param === "string" ? param : null,
      code: error.code,
      // That of a limit names the proxy's setting.
      hint: limit === undefined ? error.hint : undefined,
    },
  };
}

/**
 * The error that a client gets. The message of a failure inside the deployment may name its hosts
 * and ports, so only the code stays; a refusal of the request itself is sent as it is.
 */
export function publicError(error: KvError): KvError {
  if (statusOf(error) < 500 || error.details.httpStatus !== undefined) return error;
  return new KvError(error.code, "the request failed on this instance", {
    hint: "the instance's log has the reason; with exposeErrors the instance sends it",
  });
}

export function asKvError(error: unknown): KvError {
  return KvError.from(error, "KV_INTERNAL", "the instance failed");
}
