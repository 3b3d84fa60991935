import type { IncomingMessage, ServerResponse } from "node:http";
import type { Fleet } from "@kv/fleet/front-end";
import { answerHeaders, Deadline, forwardedHeaders, legHeaders } from "@kv/fleet/front-end";
import { errorForClient, type RequestSlot, type RequestsInFlight, sendError, shortened } from "@kv/http";
import { KvError } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { tryInstances } from "../flow/legs.js";
import { badAnswer } from "../upstream/upstream-errors.js";

export interface DecodeRouteOptions {
  readonly fleet: Fleet;
  readonly settings: Pick<ProxySettings, "limits" | "timeouts" | "forwardHeaders" | "exposeInstances">;
  readonly inFlight: RequestsInFlight;
}

/** A request that any decode instance can answer. */
export interface DecodeRequest {
  readonly request: IncomingMessage;
  readonly response: ServerResponse;
  /** The client, as limits per client count it. */
  readonly client: string;
  /** The path at the instance. */
  readonly path: string;
  /** The query, with its `?`. */
  readonly query: string;
  /** JSON text of a POST; without it the request is a GET. */
  readonly body?: string | undefined;
  /** Of a list of models, only this one is answered. */
  readonly modelId?: string | undefined;
}

/**
 * Requests that need no KV of another instance, such as `GET /v1/models`: each goes to a decode instance, and its answer back. `GET /v1/models/ID` is the model of that
 * list, as vLLM has no such route.
 */
export class DecodeRoute {
  readonly #options: DecodeRouteOptions;
  readonly #forwarded: ReadonlySet<string>;

  constructor(options: DecodeRouteOptions) {
    this.#options = options;
    this.#forwarded = forwardedHeaders(options.settings.forwardHeaders);
  }

  /** Answers one request; never rejects. */
  async serve({ request, response, client, path, query, body, modelId }: DecodeRequest): Promise<void> {
    const { fleet, settings, inFlight } = this.#options;
    const { clock, random, log } = fleet.ambient;
    const limitBytes = settings.limits.heldAnswerLengthBytes;
    let slot: RequestSlot | undefined;
    const requestId = random.uuid();
    const deadline = new Deadline({ clock, requestMs: settings.timeouts.firstByteMs });
    response.once("close", () => {
      if (!response.writableFinished)
        deadline.abort(new KvError("KV_REQUEST_ABORTED", "the client disconnected"));
    });
    response.on("error", () => {});
    try {
      slot = inFlight.admit(client);
      const tries = { pool: fleet.pools.decode, context: { requestId }, deadline, retries: 0, log };
      const { answer, bytes } = await tryInstances(tries, async (visit) => {
        const { url } = visit.instance;
        const answer = await fleet.upstream.send({
          role: "decode",
          url,
          method: body === undefined ? "GET" : "POST",
          path: `${path}${query}`,
          headers: legHeaders({ clientHeaders: request.headers, forwarded: this.#forwarded, requestId }),
          body,
          abort: deadline,
        });
        const { bytes, complete } = await answer.body.readLimited(limitBytes);
        if (!complete) {
          answer.discard();
          throw badAnswer("decode", url, `answered with more than ${limitBytes} bytes`);
        }
        visit.succeeded();
        return { answer, bytes };
      });
      if (modelId !== undefined && answer.status === 200) {
        const model = JSON.stringify(modelOf(bytes, modelId));
        response.writeHead(200, { "content-type": "application/json", "x-request-id": requestId });
        response.end(model);
        return;
      }
      response.writeHead(answer.status, answerHeaders(answer.headers, requestId));
      response.end(bytes);
    } catch (thrown) {
      const error = KvError.from(thrown, "KV_INTERNAL", "the request to a decode instance failed");
      const shown = errorForClient(error, settings.exposeInstances);
      if (!response.headersSent) sendError(response, shown, requestId);
    } finally {
      slot?.end();
      deadline.close();
    }
  }
}

/** The entry of a list of models. Errors: `KV_REQUEST_INVALID` (404), `KV_PROXY_UPSTREAM_FAILED` for another answer than a list. */
function modelOf(list: Buffer, id: string): object {
  let data: unknown;
  try {
    ({ data } = JSON.parse(list.toString()) as { data?: unknown });
  } catch (cause) {
    throw new KvError("KV_PROXY_UPSTREAM_FAILED", "the list of models is not JSON", { cause });
  }
  const models = Array.isArray(data) ? (data as ({ readonly id?: unknown } | null)[]) : [];
  const found = models.find((model) => model?.id === id);
  if (found != null) return found;
  throw new KvError("KV_REQUEST_INVALID", `there is no model ${shortened(id)}`, {
    hint: "GET /v1/models lists the models",
    details: { httpStatus: 404, param: "model" },
  });
}
