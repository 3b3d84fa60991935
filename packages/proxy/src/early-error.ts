import type { IncomingMessage, ServerResponse } from "node:http";
import type { Clock, KvError } from "@kv/interface";
import { writeError } from "./error-answer.js";

/** How long a client that was refused may go on sending. */
const DROP_MS = 30_000;

/**
 * Answers a request of which not all has arrived. A connection closed on bytes that nobody read is reset, which a client that is still
 * sending sees in place of the answer; so what comes is read and dropped first, to its end or until the time is up.
 */
export function sendEarlyError(
  request: IncomingMessage,
  response: ServerResponse,
  error: KvError,
  clock: Clock,
): void {
  // What is left of the body would be read as the next request.
  response.setHeader("connection", "close");
  writeError(response, error);
  const end = () => {
    timer.cancel();
    response.end();
  };
  const timer = clock.setTimer(end, DROP_MS);
  request.once("close", end);
  request.resume();
}
