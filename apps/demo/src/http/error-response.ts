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

/** What one client has too much of is 503 too: the proxy then tries another instance. */
export function statusOf({ code, details }: KvError): number {
  const { httpStatus } = details;
  if (httpStatus === 429) return 503;
  return typeof httpStatus === "number" ? httpStatus : (STATUS[code] ?? 500);
}

/** A failure inside the deployment, whose message may name hosts and ports. */
export function isInternal(error: KvError): boolean {
  return statusOf(error) >= 500 && error.details["httpStatus"] === undefined;
}

/** What a client gets: of a failure inside the deployment the code alone, unless `exposeErrors`. */
export function errorBody(error: KvError, exposeErrors: boolean): object {
  const { param, limit } = error.details;
  const isHidden = isInternal(error) && !exposeErrors;
  const hidden = {
    message: "the request failed on this instance",
    hint: "the instance's log has the reason; with exposeErrors the instance sends it",
  };
  // The hint of a limit names the proxy's setting.
  const shown = { message: error.message, hint: limit === undefined ? error.hint : undefined };
  return {
    error: {
      type: statusOf(error) < 500 ? "invalid_request_error" : "server_error",
      param: typeof param === "string" ? param : null,
      code: error.code,
      ...(isHidden ? hidden : shown),
    },
  };
}
