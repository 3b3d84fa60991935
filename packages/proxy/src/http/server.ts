import { createHash } from "node:crypto";
import {
  countRefusal,
  DECODE_ROUTES,
  ENDPOINTS,
  INSTANCE_CHANGES,
  type InstanceChange,
  requireToken,
  SIDECAR_ROUTES,
  whyRefused,
} from "@kv/fleet/front-end";
import {
  type Certificate,
  errorAnswer,
  errorForClient,
  HttpServer,
  type ReceivedBody,
  refusedRequest,
  sendJson,
  shortened,
  type Turn,
} from "@kv/http";
import type { KvError } from "@kv/interface";
import { packageVersion } from "@kv/program";
import type { Generation } from "../flow/generation.js";
import { MODELS_PATH, models, pass } from "../flow/other-routes.js";
import type { ClientRequest } from "../legs/client-request.js";
import type { Legs } from "../legs/legs.js";
import { applyCors } from "./cors.js";
import { docsPage, openApi } from "./openapi.js";
import type { AnswerRequest, RequestLives } from "./request-lives.js";
import type { ResolvedLimits } from "./resolved-limits.js";

export interface ClientServerOptions {
  readonly changeInstance: (change: InstanceChange, body: unknown) => Promise<object>;
  readonly limits: ResolvedLimits;
  readonly lives: RequestLives;
  readonly generation: Generation;
  readonly legs: Legs;
  readonly certificate: Certificate | undefined;
  readonly status: () => object | Promise<object>;
}

type Handler = (turn: Turn) => Promise<void>;

/** Styles of its own, no scripts, and nothing from elsewhere. */
const DOCS_HEADERS = {
  "content-type": "text/html; charset=utf-8",
  "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
};

const MODEL_PATH = `${MODELS_PATH}/`;

/** The HTTP server for clients: routes, limits, and errors in OpenAI's form. */
export class ClientServer {
  readonly http: HttpServer;
  readonly #routes = new Map<
    string,
    { readonly method: "GET" | "POST"; readonly serve: Handler }
  >();

  constructor(private readonly options: ClientServerOptions) {
    const { limits, certificate, legs } = options;
    const { fleet, settings } = legs;
    this.#addRoutes();
    this.http = new HttpServer({
      limits,
      bodies: limits,
      certificate,
      clock: fleet.ambient.clock,
      parses: fleet.parses,
      serve: (turn) => this.#serve(turn),
      answerError: (error) => {
        countRefusal(fleet.ambient.metrics, error);
        return errorAnswer(errorForClient(error, settings.exposeInstances));
      },
    });
  }

  #addRoutes(): void {
    const { status, generation, legs, lives } = this.options;
    const { fleet, settings } = legs;
    const get = (path: string, serve: Handler) => this.#routes.set(path, { method: "GET", serve });
    const post = (path: string, serve: Handler) =>
      this.#routes.set(path, { method: "POST", serve });
    for (const endpoint of ENDPOINTS)
      post(endpoint, (turn) =>
        this.#withBody(turn, (client, body) => generation.answer(client, endpoint, body)),
      );
    for (const path of DECODE_ROUTES)
      post(path, (turn) =>
        this.#withBody(turn, (client, body) => pass(legs, client, path + turn.query, body)),
      );
    get(MODELS_PATH, (turn) =>
      lives.serve(turn, MODELS_PATH, (client) => models(legs, client, turn.query)),
    );
    get(MODEL_PATH, (turn) => {
      const id = decoded(turn.path.slice(MODEL_PATH.length));
      return lives.serve(turn, MODELS_PATH, (client) => models(legs, client, turn.query, id));
    });
    if (settings.sidecar !== undefined)
      for (const path of SIDECAR_ROUTES)
        get(path, (turn) =>
          lives.serve(turn, path, (client) => pass(legs, client, path + turn.query)),
        );
    const serveHealth: Handler = async ({ response }) => {
      const { ok, body } = await fleet.health();
      sendJson(response, ok ? 200 : 503, body);
    };
    get("/health", serveHealth);
    get("/healthcheck", serveHealth);
    get("/status", async ({ response }) => sendJson(response, 200, await status()));
    get("/openapi.json", async ({ response }) =>
      sendJson(response, 200, openApi(this.#routes, packageVersion(import.meta.url))),
    );
    get("/docs", async ({ response }) => {
      response.writeHead(200, DOCS_HEADERS);
      response.end(docsPage(this.#routes));
    });
    if (settings.instanceRoutes === undefined) return;
    const { token } = settings.instanceRoutes;
    for (const change of INSTANCE_CHANGES)
      post(`/instances/${change}`, (turn) => this.#changeInstance(change, turn, token));
  }

  async #serve(turn: Turn): Promise<void> {
    const { request, response, path, query, expectsContinue } = turn;
    // A client must not send its next request to a server that is closing.
    if (this.options.legs.fleet.isDraining) response.setHeader("connection", "close");
    const { cors } = this.options.legs.settings;
    if (cors !== undefined && applyCors(cors.origins, request, response)) return;
    const route = this.#routes.get(path.startsWith(MODEL_PATH) ? MODEL_PATH : path);
    if (route === undefined) throw notFound(request.method, path);
    // A HEAD is answered as a GET; Node leaves out the body.
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

  async #withBody(
    turn: Turn,
    answer: (client: ClientRequest, body: ReceivedBody) => ReturnType<AnswerRequest>,
  ): Promise<void> {
    const { lives } = this.options;
    lives.check(turn.client);
    const body = await this.http.readBody(turn);
    try {
      await lives.serve(turn, turn.path, (client) => answer(client, body), body);
    } finally {
      body.share.end();
    }
  }

  /** As on the admin port. Pages of other sites know no token and have an origin. */
  async #changeInstance(
    change: InstanceChange,
    turn: Turn,
    token: string | undefined,
  ): Promise<void> {
    const { request, response } = turn;
    // vLLM's demo proxy takes its key in this header.
    requireToken(request.headers.authorization, token, request.headers["x-api-key"]);
    if (token === undefined && request.headers.origin !== undefined)
      throw refusedRequest(
        403,
        "instances are not changed by web pages",
        "send the request without a browser, or set a token (instanceRoutes.token)",
      );
    await this.http.withJson(turn, async (body) =>
      sendJson(response, 200, await this.options.changeInstance(change, body)),
    );
  }

  /** The client's name: from a front end's header, else its address. */
  #clientOf({ request, client }: Turn): string {
    const { clientHeader } = this.options.limits;
    const name = clientHeader === undefined ? undefined : request.headers[clientHeader];
    if (typeof name !== "string" || name === "") return client;
    // The name may be a key, which must not stay in memory.
    return createHash("sha256").update(name).digest("base64");
  }
}

function notFound(method: string | undefined, path: string): KvError {
  if (INSTANCE_CHANGES.some((change) => path === `/instances/${change}`))
    return refusedRequest(
      404,
      `${path} is not served on the clients' port`,
      "start with --instance-routes (instanceRoutes), or use the admin port (--admin-port)",
    );
  const why = whyRefused(method ?? "", path);
  if (why !== undefined)
    return refusedRequest(404, `${method} ${shortened(path)} is not served here: ${why}`);
  return refusedRequest(
    404,
    `there is no route ${method} ${shortened(path)}`,
    "the routes are POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, GET /v1/models, /v1/models/ID, /health, /status; GET /docs lists all",
  );
}

function wrongMethod(method: string | undefined, path: string, allow: string): KvError {
  const message = `${shortened(path)} is served to ${allow}, not to ${method}`;
  return refusedRequest(405, message, `send ${allow}`, { allow });
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
