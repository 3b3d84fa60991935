import type { IncomingHttpHeaders, ServerResponse } from "node:http";
import { type Clock, KvError } from "@kv/interface";
import { type AttemptOptions, onSomeInstance } from "./attempts.js";
import { hold } from "./bounded-body.js";
import { createDeadline } from "./deadline.js";
import { sendError } from "./error-answer.js";
import { answerHeaders, legHeaders } from "./headers.js";
import type { Upstream } from "./upstream.js";

export interface ModelsRouteOptions extends AttemptOptions {
  readonly upstream: Upstream;
  readonly clock: Clock;
  readonly limitBytes: number;
  readonly timeoutMs: number;
}

/** Passes a GET on to a decode instance and its answer back; never rejects. */
export function createModelsRoute(options: ModelsRouteOptions) {
  const { upstream, clock, limitBytes, timeoutMs } = options;
  return async (
    path: string,
    requestId: string,
    given: IncomingHttpHeaders,
    response: ServerResponse,
  ): Promise<void> => {
    const deadline = createDeadline({ clock, requestMs: timeoutMs });
    response.once("close", () => {
      if (!response.writableFinished)
        deadline.abort(new KvError("KV_REQUEST_ABORTED", "the client went away"));
    });
    response.on("error", () => {});
    try {
      await onSomeInstance(options, { requestId, deadline }, async (visit) => {
        const { url } = visit.instance;
        const headers = legHeaders(given, requestId);
        const answer = await upstream.send({
          role: "decode",
          url,
          method: "GET",
          path,
          headers,
          ending: deadline,
        });
        const { bytes, complete } = await hold(answer.body, limitBytes);
        if (!complete) {
          answer.discard();
          throw new KvError(
            "KV_PROXY_UPSTREAM_FAILED",
            `${url}${path} answered with more than ${limitBytes} bytes`,
          );
        }
        visit.succeeded();
        response.writeHead(answer.status, answerHeaders(answer.headers, requestId));
        response.end(bytes);
      });
    } catch (thrown) {
      const error = KvError.from(thrown, "KV_INTERNAL", `${path} failed`);
      if (!response.headersSent) sendError(response, error, requestId);
    } finally {
      deadline.close();
    }
  };
}
