import type { ServerResponse } from "node:http";
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

/** An answer of server-sent events, each a JSON object, ended by `[DONE]`. */
export interface EventStream {
  send(data: object): void;
  /** The answer is complete. */
  end(): void;
  /** The answer has failed after its begin: the error is its last event. */
  fail(error: KvError): void;
}

export function openEventStream(response: ServerResponse, requestId: string): EventStream {
  response.writeHead(200, {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-request-id": requestId,
  });
  const write = (text: string) => {
    if (!response.destroyed) response.write(`data: ${text}\n\n`);
  };
  return {
    send: (data) => write(JSON.stringify(data)),
    end() {
      write("[DONE]");
      response.end();
    },
    fail(error) {
      write(JSON.stringify(errorBody(error)));
      write("[DONE]");
      response.end();
    },
  };
}
