import { createHash } from "node:crypto";
import {
  DECODE_ROUTES,
  ENDPOINTS,
  type Endpoint,
  type Fleet,
  INSTANCE_CHANGES,
  type InstanceChange,
  refuseConnectorMembers,
  requireToken,
  SIDECAR_ROUTES,
  whyRefused,
} from "@kv/fleet/front-end";
import {
  type Certificate,
  errorAnswer,
  errorForClient,
  HttpServer,
  sendJson,
  shortened,
  type Turn,
} from "@kv/http";
import { KvError } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { applyCors } from "./cors.js";
import type { DecodeRoute } from "./decode-route.js";
import type { GenerationRoute } from "./generation-route.js";
import type { ResolvedLimits } from "./limits/resolved-limits.js";

/** Options of `ClientServer`. */
export interface ClientServerOptions {
  readonly fleet: Fleet;
  readonly settings: Pick<
    ProxySettings,
    "timeouts" | "exposeInstances" | "cors" | "instanceRoutes" | "sidecar"
  >;
  /** As the function `changeInstance`. */
  readonly changeInstance: (change: InstanceChange, body: unknown) => Promise<object>;
  readonly limits: ResolvedLimits;
  readonly generation: GenerationRoute;
  readonly decodeRoute: DecodeRoute;
  /** With it, clients speak TLS. */
  readonly certificate: Certificate | undefined;
  /** The JSON of `/status`. */
  readonly status: () => object | Promise<object>;
}

type Handler = (turn: Turn) => Promise<void>;

const MODELS_PATH = "/v1/models";
const MODEL_PATH = "/v1/models/";
/** The HTTP server for clients: its routes, its limits, and errors in OpenAI's form. */
export class ClientServer {
  readonly http: HttpServer;
  readonly #options: ClientServerOptions;
  /** By path, the method and what serves it. */
  readonly #routes = new Map<
    string,
    { readonly method: "GET" | "POST"; readonly serve: Handler }
  >();

  constructor(options: ClientServerOptions) {
    this.#options = options;
    const { limits, settings, certificate, fleet } = options;
    this.#addRoutes();
    this.http = new HttpServer({
      limits: { ...limits, ...settings.timeouts },
      bodies: limits,
      certificate,
      clock: fleet.ambient.clock,
      parses: fleet.parses,
      serve: (turn) => this.#serve(turn),
      answerError: (error) => {
        this.#countRefusal(error);
        return errorAnswer(errorForClient(error, settings.exposeInstances));
      },
    });
  }

  #addRoutes(): void {
    const { fleet, status, settings } = this.#options;
    for (const endpoint of ENDPOINTS)
      this.#routes.set(endpoint, {
        method: "POST",
        serve: (turn) => this.#generate(endpoint, turn),
      });
    const get = (path: string, serve: Handler) => this.#routes.set(path, { method: "GET", serve });
    const { decodeRoute } = this.#options;
    get(MODELS_PATH, (turn) => decodeRoute.serveModels(turn));
    get(MODEL_PATH, (turn) =>
      decodeRoute.serveModels({
        ...turn,
        path: MODELS_PATH,
        modelId: decoded(turn.path.slice(MODEL_PATH.length)),
      }),
    );
    for (const path of DECODE_ROUTES)
      this.#routes.set(path, { method: "POST", serve: (turn) => this.#passOnWithBody(turn) });
    if (settings.sidecar !== undefined)
      for (const path of SIDECAR_ROUTES) get(path, (turn) => this.#passOn(turn));
    const serveHealth: Handler = async ({ response }) => {
      const { ok, body } = await fleet.health();
      sendJson(response, ok ? 200 : 503, body);
    };
    get("/health", serveHealth);
    get("/healthcheck", serveHealth);
    get("/status", async ({ response }) => sendJson(response, 200, await status()));
    if (settings.instanceRoutes === undefined) return;
    const { token } = settings.instanceRoutes;
    for (const change of INSTANCE_CHANGES) {
      const serve: Handler = (turn) => this.#changeInstance(change, turn, token);
      this.#routes.set(`/instances/${change}`, { method: "POST", serve });
    }
  }

  async #serve(turn: Turn): Promise<void> {
    const { request, response, path, query, expectsContinue } = turn;
    // A client that keeps its connection would send its next request to a server that is closing.
    if (this.#options.fleet.isDraining) response.setHeader("connection", "close");
    const { cors } = this.#options.settings;
    if (cors !== undefined && applyCors(cors.origins, request, response)) return;
    const route = this.#routes.get(path.startsWith(MODEL_PATH) ? MODEL_PATH : path);
    if (route === undefined) throw notFound(request.method, path);
    // A HEAD is answered as a GET; Node leaves the body out.
    const method = request.method === "HEAD" ? "GET" : request.method;
    if (route.method !== method) throw wrongMethod(request.method, path, route.method);
    await route.serve({
      request,
      response,
      path,
      query,
      expectsContinue,
      client: this.#clientOf(turn),
    });
  }

  async #generate(endpoint: Endpoint, turn: Turn): Promise<void> {
    const { request, response, client } = turn;
    const { generation } = this.#options;
    generation.check(client);
    const body = await this.http.readBody(turn);
    try {
      await generation.serve({ endpoint, headers: request.headers, body, response, client });
    } finally {
      body.share.end();
    }
  }

  /** Has a decode instance answer a GET. */
  #passOn(turn: Turn): Promise<void> {
    return this.#options.decodeRoute.serve(turn);
  }

  #passOnWithBody(turn: Turn): Promise<void> {
    return this.http.withJson(turn, (body) => {
      refuseConnectorMembers(body as Readonly<Record<string, unknown>>);
      return this.#options.decodeRoute.serve({ ...turn, body: JSON.stringify(body) });
    });
  }

  /** As on the admin port. A page of another site knows no token, and has an origin. */
  async #changeInstance(
    change: InstanceChange,
    turn: Turn,
    token: string | undefined,
  ): Promise<void> {
    const { request, response } = turn;
    // vLLM's demo proxy takes its key in this header.
    requireToken(request.headers.authorization, token, request.headers["x-api-key"]);
    if (token === undefined && request.headers.origin !== undefined) {
      throw new KvError("KV_REQUEST_INVALID", "instances are not changed by web pages", {
        hint: "send the request without a browser, or set a token (instanceRoutes.token)",
        details: { httpStatus: 403 },
      });
    }
    await this.http.withJson(turn, async (body) =>
      sendJson(response, 200, await this.#options.changeInstance(change, body)),
    );
  }

  /** The client of a request: named by a header that a front end sets, else by its address. */
  #clientOf({ request, client }: Turn): string {
    const { clientHeader } = this.#options.limits;
    const name = clientHeader === undefined ? undefined : request.headers[clientHeader];
    if (typeof name !== "string" || name === "") return client;
    // It may be a key, which should not stay in memory as it is.
    return createHash("sha256").update(name).digest("base64");
  }

  #countRefusal({ details }: KvError): void {
    const { limit } = details;
    if (typeof limit === "string")
      this.#options.fleet.ambient.metrics.count("kv_proxy_refused_total", 1, { limit });
  }
}

function notFound(method: string | undefined, path: string): KvError {
  if (INSTANCE_CHANGES.some((change) => path === `/instances/${change}`))
    return new KvError("KV_REQUEST_INVALID", `${path} is not served on the clients' port`, {
      hint: "start with --instance-routes (instanceRoutes), or use the admin port (--admin-port)",
      details: { httpStatus: 404 },
    });
  const why = whyRefused(method ?? "", path);
  if (why !== undefined)
    return new KvError(
      "KV_REQUEST_INVALID",
      `${method} ${shortened(path)} is not served here: ${why}`,
      {
        details: { httpStatus: 404 },
      },
    );
  return new KvError("KV_REQUEST_INVALID", `there is no route ${method} ${shortened(path)}`, {
    hint: "the routes are POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, GET /v1/models, /v1/models/ID, /health, /status",
    details: { httpStatus: 404 },
  });
}

function wrongMethod(method: string | undefined, path: string, allow: string): KvError {
  const message = `${shortened(path)} is served to ${allow}, not to ${method}`;
  return new KvError("KV_REQUEST_INVALID", message, {
    hint: `send ${allow}`,
    details: { httpStatus: 405, allow },
  });
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
