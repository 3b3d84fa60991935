import type { IncomingMessage, ServerResponse } from "node:http";
import type { PooledInstance, Visit } from "@kv/fleet";
import type { Fleet, UpstreamAnswer } from "@kv/fleet/front-end";
import { answerHeaders, Deadline, forwardedHeaders, legHeaders } from "@kv/fleet/front-end";
import {
  errorForClient,
  type RequestSlot,
  type RequestsInFlight,
  sendError,
  shortened,
} from "@kv/http";
import { KvError } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { tryInstances } from "../legs/legs.js";
import {
  badAnswer,
  badStatus,
  isModelMissing,
  MODEL_MISSING,
} from "../upstream/upstream-errors.js";

export interface DecodeRouteOptions {
  readonly fleet: Fleet;
  readonly settings: Pick<
    ProxySettings,
    "limits" | "timeouts" | "forwardHeaders" | "exposeInstances"
  >;
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
 * Requests that need no KV of another instance, such as `GET /v1/models`: each goes to a decode
 * instance, and its answer back. `GET /v1/models/ID` is the model of that list, as vLLM has no such
 * route.
 */
export class DecodeRoute {
  readonly #options: DecodeRouteOptions;
  readonly #forwarded: ReadonlySet<string>;

  constructor(options: DecodeRouteOptions) {
    this.#options = options;
    this.#forwarded = forwardedHeaders(options.settings.forwardHeaders).decode;
  }

  /** Answers one request; never rejects. */
  serve(request: DecodeRequest): Promise<void> {
    return this.#answer(request, async (requestId, deadline) => {
      const { answer, bytes } = await this.#ask(request, requestId, deadline);
      request.response.writeHead(answer.status, answerHeaders(answer.headers, requestId));
      request.response.end(bytes);
    });
  }

  /** Answers with the models of all decode instances, or with one of them; never rejects. */
  serveModels(request: DecodeRequest): Promise<void> {
    const servers = new Map(this.#options.fleet.pools.decode.list().map((one) => [one.url, one]));
    const { modelId, response } = request;
    if (servers.size < 2 && modelId === undefined) return this.serve(request);
    return this.#answer(request, async (requestId, deadline) => {
      const models = await this.#models(request, [...servers.values()], requestId, deadline);
      const body =
        modelId === undefined ? { object: "list", data: models } : modelOf(models, modelId);
      response.writeHead(200, { "content-type": "application/json", "x-request-id": requestId });
      response.end(JSON.stringify(body));
    });
  }

  /**
   * The models of these servers together. One that not all have says so.
   * @throws That of the first server, where none answered.
   */
  async #models(
    request: DecodeRequest,
    servers: readonly PooledInstance[],
    requestId: string,
    deadline: Deadline,
  ): Promise<Model[]> {
    const available = servers.filter((server) => server.available()).slice(0, MOST_ASKED);
    const asked = available.length === 0 ? [undefined] : available;
    const lists = await Promise.allSettled(
      asked.map(async (server) => {
        const { answer, bytes } = await this.#ask(request, requestId, deadline, server?.begin());
        return modelsIn(answer.status, bytes);
      }),
    );
    const answered = lists.flatMap((list) => (list.status === "fulfilled" ? [list.value] : []));
    const [first] = lists;
    if (answered.length === 0 && first?.status === "rejected") throw first.reason;
    const byId = new Map<unknown, Model[]>();
    for (const model of answered.flat()) byId.set(model.id, [...(byId.get(model.id) ?? []), model]);
    return [...byId.values()].flatMap(([model, ...others]): Model[] => {
      const count = others.length + 1;
      if (model === undefined) return [];
      if (count >= answered.length) return [model];
      return [{ ...model, note: `${count} of ${answered.length} decode instances have it` }];
    });
  }

  /**
   * Asks decode instances, one after another, until one has the model. With `only`, that one and no
   * other.
   */
  async #ask(
    { request, path, query, body }: DecodeRequest,
    requestId: string,
    deadline: Deadline,
    only?: Visit,
  ): Promise<HeldAnswer> {
    const { fleet, settings } = this.#options;
    const limitBytes = settings.limits.heldAnswerLengthBytes;
    const pool = fleet.pools.decode;
    const { log } = fleet.ambient;
    let missing: HeldAnswer | undefined;
    // No instance holds anything for the request, and nothing leaves before the answer is whole.
    const tries = { pool, context: { requestId }, deadline, retries: 1, log, only };
    return tryInstances(tries, async (visit) => {
      const { url } = visit.instance;
      const answer = await fleet.upstream.send({
        role: "decode",
        url,
        method: body === undefined ? "GET" : "POST",
        path: `${path}${query}`,
        headers: legHeaders({
          clientHeaders: request.headers,
          forwarded: this.#forwarded,
          requestId,
        }),
        body,
        abort: deadline,
      });
      const { bytes, complete } = await answer.body.readLimited(limitBytes);
      if (!complete) {
        answer.discard();
        throw badAnswer("decode", url, `answered with more than ${limitBytes} bytes`);
      }
      visit.succeeded();
      if (answer.status !== MODEL_MISSING || pool.list().length === 1) return { answer, bytes };
      missing = { answer, bytes };
      throw badStatus("decode", url, MODEL_MISSING);
    }).catch((error: unknown) => {
      if (missing !== undefined && isModelMissing(error)) return missing;
      throw error;
    });
  }

  /** Runs `work`, and answers with its error. Never rejects. */
  async #answer(
    { response, client }: DecodeRequest,
    work: (requestId: string, deadline: Deadline) => Promise<void>,
  ): Promise<void> {
    const { fleet, settings, inFlight } = this.#options;
    const { clock, random } = fleet.ambient;
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
      await work(requestId, deadline);
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

/** A complete answer. */
interface HeldAnswer {
  readonly answer: UpstreamAnswer;
  readonly bytes: Buffer;
}

/** A list of models asks no more servers. */
const MOST_ASKED = 32;

type Model = Readonly<Record<string, unknown>>;

/**
 * The entries of a list of models.
 * @throws `KV_PROXY_UPSTREAM_FAILED` for another answer.
 */
function modelsIn(status: number, list: Buffer): Model[] {
  let data: unknown;
  try {
    ({ data } = JSON.parse(list.toString()) as { data?: unknown });
  } catch (cause) {
    throw new KvError("KV_PROXY_UPSTREAM_FAILED", "the list of models is not JSON", { cause });
  }
  if (status !== 200 || !Array.isArray(data))
    throw new KvError(
      "KV_PROXY_UPSTREAM_FAILED",
      `the list of models was answered with status ${status}`,
    );
  return data.filter((model): model is Model => typeof model === "object" && model !== null);
}

/**
 * The entry of a list of models.
 * @throws `KV_REQUEST_INVALID` (404).
 */
function modelOf(models: readonly Model[], id: string): Model {
  const found = models.find((model) => model.id === id);
  if (found !== undefined) return found;
  throw new KvError("KV_REQUEST_INVALID", `there is no model ${shortened(id)}`, {
    hint: "GET /v1/models lists the models",
    details: { httpStatus: 404, param: "model" },
  });
}
