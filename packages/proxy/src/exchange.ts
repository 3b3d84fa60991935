import type { ServerResponse } from "node:http";
import type { KvError } from "@kv/interface";
import type { Part } from "./leg-order.js";

/** One request of a client, from its body to the last byte of its answer. */
export interface Exchange extends Part {
  readonly response: ServerResponse;
}

/** Filled in on the way: for the access log, the timeline, and for how to break off. Times are on the proxy's clock. */
export interface Trail {
  prefill?: string;
  decode?: string;
  prefillStartedAtMs?: number;
  prefillMs?: number;
  decodeStartedAtMs?: number;
  firstByteMs?: number;
  answerLengthBytes?: number;
  status?: number;
  /** How many parts the request was split into, where that is more than one. */
  parts?: number;
  /** How often it began again at prefill. */
  restarts?: number;
  /** Blocks of a prefill worker are being freed, as no decode worker would take them. */
  released?: boolean;
  /** The answer's head has left, and it is a stream of events. */
  eventStream?: boolean;
  /** The client has the instance's own words for it, in an answer that came to its end; the request has failed all the same. */
  failure?: KvError;
}
