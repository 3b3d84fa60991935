import type { ServerResponse } from "node:http";
import type { KvError } from "@kv/interface";
import { errorBody } from "./error-answer.js";

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
