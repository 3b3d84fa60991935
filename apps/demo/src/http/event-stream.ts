import type { ServerResponse } from "node:http";
import type { KvError } from "@kv/interface";
import { errorBody } from "./error-response.js";

/** A response of server-sent events, each a JSON object, ended by `[DONE]`. */
export class EventStream {
  readonly #response: ServerResponse;
  readonly #maxUnreadBytes: number;

  constructor(response: ServerResponse, requestId: string, maxUnreadBytes: number) {
    this.#response = response;
    this.#maxUnreadBytes = maxUnreadBytes;
    response.writeHead(200, {
      "content-type": "text/event-stream; charset=utf-8",
      "cache-control": "no-cache",
      "x-request-id": requestId,
    });
  }

  send(data: object): void {
    this.#write(JSON.stringify(data));
  }

  end(): void {
    this.#write("[DONE]");
    this.#response.end();
  }

  /** Ends a response that failed after it began; the error is its last event. */
  fail(error: KvError): void {
    this.send(errorBody(error));
    this.end();
  }

  #write(text: string): void {
    if (this.#response.destroyed) return;
    this.#response.write(`data: ${text}\n\n`);
    // The client does not read. The close of the response aborts the request.
    if (this.#response.writableLength > this.#maxUnreadBytes) this.#response.destroy();
  }
}
