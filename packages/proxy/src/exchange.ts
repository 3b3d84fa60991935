import type { IncomingHttpHeaders, ServerResponse } from "node:http";
import type { Deadline } from "./deadline.js";
import type { GenerationRequest } from "./request-body.js";

/** One request of a client, from its body to the last byte of its answer. */
export interface Exchange {
  /** `X-Request-Id`, the client's or one made here; both legs carry it. */
  readonly requestId: string;
  readonly request: GenerationRequest;
  readonly headers: IncomingHttpHeaders;
  readonly response: ServerResponse;
  readonly deadline: Deadline;
  /** Filled in on the way: for the access log, and for how to break off. */
  readonly trail: Trail;
}

export interface Trail {
  prefill?: string;
  decode?: string;
  prefillMs?: number;
  firstByteMs?: number;
  answerLengthBytes?: number;
  status?: number;
  /** The answer's head has left, and it is a stream of events. */
  eventStream?: boolean;
}

/** How a request goes through prefill and decode. Pull is the first; another order of the legs is another flow. */
export interface Flow {
  readonly name: string;
  /** Writes the answer. Errors before the first byte are the caller's to write. */
  run(exchange: Exchange): Promise<void>;
}
