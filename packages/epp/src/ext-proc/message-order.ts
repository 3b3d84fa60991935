import { type ProcessingRequest, WrongUse } from "./messages.js";

/** How far the request, or its answer, has come. */
interface Progress {
  hasBegun: boolean;
  hasEnded: boolean;
}

/**
 * The order of a stream's messages: headers, body, trailers, of the request and then of the answer. A gateway may leave parts out by its configuration, and an Envoy sends a second,
 * empty end of a body (envoy#46237). Its own answer may come before the request has ended.
 */
export class MessageOrder {
  readonly #request: Progress = { hasBegun: false, hasEnded: false };
  readonly #answer: Progress = { hasBegun: false, hasEnded: false };

  /** Whether a message is to be read; false for one that says nothing. Errors: `WrongUse` for one that cannot follow those before it. */
  takes(message: ProcessingRequest): boolean {
    const isAnswer =
      message.response_headers !== undefined ||
      message.response_body !== undefined ||
      message.response_trailers !== undefined;
    const progress = isAnswer ? this.#answer : this.#request;
    const of = isAnswer ? "response" : "request";
    const headers = message.request_headers ?? message.response_headers;
    const body = message.request_body ?? message.response_body;
    const trailers = message.request_trailers ?? message.response_trailers;
    if (headers === undefined && body === undefined && trailers === undefined) return false;
    const part = headers !== undefined ? "headers" : body !== undefined ? "body" : "trailers";
    if (!this.#request.hasBegun && (isAnswer || headers === undefined))
      throw first(`${of}_${part}`, "request");
    if (headers !== undefined) {
      if (progress.hasBegun) throw new WrongUse(`${of}_headers came twice in one stream`);
      progress.hasBegun = true;
      progress.hasEnded = headers.end_of_stream === true;
      return true;
    }
    if (!progress.hasBegun) throw first(`${of}_${part}`, of);
    // Nobody reads the rest of a request that has its answer.
    if (!isAnswer && this.#answer.hasBegun) return false;
    if (progress.hasEnded) {
      if (body !== undefined && (body.body?.length ?? 0) === 0) return false;
      throw new WrongUse(`${of}_${part} came after the end of the ${of}`);
    }
    progress.hasEnded = trailers !== undefined || body?.end_of_stream === true;
    return true;
  }
}

function first(part: string, of: string): WrongUse {
  return new WrongUse(`${part} came before ${of}_headers; set processing_mode.${of}_header_mode to SEND`);
}
