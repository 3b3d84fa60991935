import { KvError, type KvErrorCode } from "@kv/interface";

const STATUS: Partial<Record<KvErrorCode, number>> = {
  KV_REQUEST_INVALID: 400,
  KV_OUT_OF_BLOCKS: 400,
  KV_REQUEST_ABORTED: 499,
};

/** A `KvError` for a client, with the HTTP status where the code does not say it. */
export function httpError(httpStatus: number, message: string, param?: string): KvError {
  return new KvError("KV_REQUEST_INVALID", message, {
    details: { httpStatus, ...(param === undefined ? {} : { param }) },
  });
}

export function statusOf(error: KvError): number {
  const { httpStatus } = error.details;
  return typeof httpStatus === "number" ? httpStatus : (STATUS[error.code] ?? 500);
}

/** An error in the form that OpenAI's clients read. */
export function errorBody(error: KvError): { error: Record<string, unknown> } {
  const { param } = error.details;
  return {
    error: {
      message: error.message,
      type: statusOf(error) < 500 ? "invalid_request_error" : "server_error",
      param: typeof param === "string" ? param : null,
      code: error.code,
      ...(error.hint === undefined ? {} : { hint: error.hint }),
    },
  };
}
