import type { IncomingMessage, ServerResponse } from "node:http";
import type { InstancePool } from "@kv/fleet";
import { type Ambient, KvError } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { tryInstances } from "../flow/attempts.js";
import { Deadline } from "../request/deadline.js";
import type { Upstream } from "../upstream/upstream.js";
import { sendError } from "./error-response.js";
import { answerHeaders, legHeaders } from "./headers.js";

export interface ModelsRouteOptions {
  readonly decoders: InstancePool;
  readonly upstream: Upstream;
  readonly settings: Pick<ProxySettings, "limits" | "timeouts">;
  readonly ambient: Ambient;
}

/** `GET /v1/models`: passes the request on to a decode instance, and its answer back. */
export class ModelsRoute {
  readonly #options: ModelsRouteOptions;

  constructor(options: ModelsRouteOptions) {
    this.#options = options;
  }

  /** Answers one request; never rejects. */
  async serve(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const { decoders, upstream, settings, ambient } = this.#options;
    const { clock, random, log } = ambient;
    const limitBytes = settings.limits.heldAnswerLengthBytes;
    const path = request.url ?? "";
    const requestId = random.uuid();
    const deadline = new Deadline({ clock, requestMs: settings.timeouts.firstByteMs });
    response.once("close", () => {
      if (!response.writableFinished)
        deadline.abort(new KvError("KV_REQUEST_ABORTED", "the client disconnected"));
    });
    response.on("error", () => {});
    try {
      const tries = { pool: decoders, context: { requestId }, deadline, retries: 0, log };
      await tryInstances(tries, async (visit) => {
        const { url } = visit.instance;
        const answer = await upstream.send({
          role: "decode",
          url,
          method: "GET",
          path,
          headers: legHeaders(request.headers, requestId),
          abort: deadline,
        });
        const { bytes, complete } = await answer.body.readLimited(limitBytes);
        if (!complete) {
          answer.discard();
          const message = `${url}${path} answered with more than ${limitBytes} bytes`;
          throw new KvError("KV_PROXY_UPSTREAM_FAILED", message);
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
  }
}
