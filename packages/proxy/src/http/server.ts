import { createHash } from "node:crypto";
import {
  createServer as createHttpServer,
  type IncomingMessage,
  type Server,
  type ServerResponse,
} from "node:http";
import type { AddressInfo, Socket } from "node:net";
import { type Ambient, KvError } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import type { Endpoint } from "../request/generation-request.js";
import { shortened } from "../request/shown-value.js";
import {
  errorForClient,
  refuseConnection,
  sendEarlyError,
  sendError,
  sendParserError,
} from "./error-response.js";
import type { GenerationRoute } from "./generation-route.js";
import { BodyBudget } from "./limits/body-budget.js";
import { ClientConnections } from "./limits/client-connections.js";
import { checkRequestHead, targetOf } from "./limits/request-head.js";
import type { ResolvedLimits } from "./limits/resolved-limits.js";
import type { ModelsRoute } from "./models-route.js";
import { readJsonBody } from "./read-body.js";

export interface ServerOptions {
  readonly ambient: Ambient;
  readonly settings: Pick<ProxySettings, "timeouts" | "exposeInstances">;
  readonly limits: ResolvedLimits;
  readonly generation: GenerationRoute;
  readonly models: ModelsRoute;
  /** True while the proxy closes. */
  readonly isDraining: () => boolean;
  /** Finds out whether the proxy can serve requests; with the JSON of `/health`. */
  readonly health: () => Promise<{ readonly ok: boolean; readonly body: object }>;
  /** The JSON of `/status`. */
  readonly status: () => object;
}

/** A request whose turn it is. */
interface Turn {
  readonly request: IncomingMessage;
  readonly response: ServerResponse;
  /** The client, as limits per client count it. */
  readonly client: string;
  /** The query of the target, with its `?`. */
  readonly query: string;
  /** The client waits for `100 Continue` before it sends its body. */
  readonly expectsContinue: boolean;
}

type Handler = (turn: Turn) => Promise<void>;

const ENDPOINTS: readonly Endpoint[] = ["/v1/completions", "/v1/chat/completions", "/v1/responses"];

/** The HTTP server for clients: its routes, its limits, and errors in OpenAI's form. */
export function createServer(options: ServerOptions): Server {
  return new ClientServer(options).server;
}

class ClientServer {
  readonly server: Server;
  readonly #options: ServerOptions;
  readonly #routes = new Map<string, Handler>();
  readonly #connections: ClientConnections;
  readonly #budget: BodyBudget;

  constructor(options: ServerOptions) {
    this.#options = options;
    const { limits, ambient } = options;
    const { metrics, clock } = ambient;
    this.#budget = new BodyBudget({
      allBytes: limits.bodiesLengthBytes,
      perClientBytes: limits.bodiesPerClientLengthBytes,
    });
    this.#connections = new ClientConnections({
      all: limits.connections,
      perAddress: limits.connectionsPerAddress,
      pipelined: limits.pipelinedRequests,
      refuse: (socket, error, answer) => {
        metrics.count("kv_proxy_refused_total", 1, { limit: String(error.details.limit) });
        refuseConnection(socket, error, answer);
      },
    });
    this.#addRoutes();
    const { timeouts } = options.settings;
    const headersMs = Math.min(timeouts.headersMs, timeouts.receiveMs);
    this.server = createHttpServer({
      maxHeaderSize: limits.headersLengthBytes,
      // How often Node searches for requests that are late; its default is 30 s.
      connectionsCheckingInterval: Math.ceil(Math.min(30_000, headersMs / 4)),
    });
    this.server.requestTimeout = timeouts.receiveMs;
    this.server.keepAliveTimeout = timeouts.keepAliveMs;
    this.server.headersTimeout = headersMs;
    this.server.on("connection", (socket) => this.#connections.accept(socket));
    this.server.on("request", (request, response) => this.#accept(request, response, false));
    this.server.on("checkContinue", (request, response) => this.#accept(request, response, true));
    this.server.on("clientError", (error, socket) => sendParserError(error, socket as Socket, clock));
  }

  #addRoutes(): void {
    const { models, health, status } = this.#options;
    for (const endpoint of ENDPOINTS)
      this.#routes.set(`POST ${endpoint}`, (turn) => this.#generate(endpoint, turn));
    this.#routes.set("GET /v1/models", ({ request, response, client, query }) => {
      this.#connections.received(request);
      return models.serve({ request, response, client, path: `/v1/models${query}` });
    });
    const serveHealth: Handler = async ({ response }) => {
      const { ok, body } = await health();
      sendJson(response, ok ? 200 : 503, body);
    };
    this.#routes.set("GET /health", serveHealth);
    this.#routes.set("GET /healthcheck", serveHealth);
    this.#routes.set("GET /status", async ({ response }) => sendJson(response, 200, status()));
  }

  #accept(request: IncomingMessage, response: ServerResponse, expectsContinue: boolean): void {
    this.#connections.takeTurn(request, response, () => this.#serve(request, response, expectsContinue));
  }

  #serve(request: IncomingMessage, response: ServerResponse, expectsContinue: boolean): void {
    const { isDraining, settings, ambient } = this.#options;
    // A client that keeps its connection would send its next request to a server that is closing.
    if (isDraining()) response.setHeader("connection", "close");
    this.#route(request, response, expectsContinue).catch((thrown: unknown) => {
      const error = KvError.from(thrown, "KV_INTERNAL", "the proxy failed");
      this.#countRefusal(error);
      const shown = errorForClient(error, settings.exposeInstances);
      if (response.headersSent || response.destroyed) response.destroy();
      else if (request.complete) sendError(response, shown);
      else sendEarlyError(request, response, shown, ambient.clock);
    });
  }

  async #route(request: IncomingMessage, response: ServerResponse, expectsContinue: boolean): Promise<void> {
    try {
      checkRequestHead(request);
    } catch (error) {
      // Another reading of this head would find another end of the request.
      response.setHeader("connection", "close");
      throw error;
    }
    const { path, query } = targetOf(request.url ?? "");
    const handler = this.#routes.get(`${request.method} ${path}`);
    if (handler === undefined) throw notFound(request.method, path);
    await handler({ request, response, client: this.#clientOf(request), query, expectsContinue });
  }

  async #generate(endpoint: Endpoint, turn: Turn): Promise<void> {
    const { request, response, client, expectsContinue } = turn;
    const { generation, limits } = this.#options;
    generation.check(client);
    const body = await readJsonBody(request, {
      limits,
      budget: this.#budget,
      client,
      onAccepted: expectsContinue ? () => response.writeContinue() : undefined,
    });
    this.#connections.received(request);
    try {
      await generation.serve({ endpoint, headers: request.headers, body, response, client });
    } finally {
      body.share.end();
    }
  }

  /** The client of a request: named by a header that a front end sets, else by its address. */
  #clientOf(request: IncomingMessage): string {
    const { clientHeader } = this.#options.limits;
    const name = clientHeader === undefined ? undefined : request.headers[clientHeader];
    if (typeof name !== "string" || name === "") return this.#connections.addressOf(request.socket);
    // It may be a key, which should not stay in memory as it is.
    return createHash("sha256").update(name).digest("base64");
  }

  #countRefusal({ details }: KvError): void {
    const { limit } = details;
    if (typeof limit === "string")
      this.#options.ambient.metrics.count("kv_proxy_refused_total", 1, { limit });
  }
}

function notFound(method: string | undefined, path: string): KvError {
  return new KvError("KV_REQUEST_INVALID", `there is no route ${method} ${shortened(path)}`, {
    hint: "the routes are POST /v1/completions, /v1/chat/completions, /v1/responses, GET /v1/models, /health, /status",
    details: { httpStatus: 404 },
  });
}

function sendJson(response: ServerResponse, status: number, value: object): void {
  const body = JSON.stringify(value);
  response.writeHead(status, {
    "content-type": "application/json",
    "content-length": Buffer.byteLength(body),
  });
  response.end(body);
}

/**
 * Starts to listen, and resolves with the port. Errors: `KV_CONFIG_INVALID` when the port is taken or the host is not of this machine.
 */
export async function listen(server: Server, host: string, port: number): Promise<number> {
  try {
    await new Promise<void>((resolve, reject) => {
      server.once("error", reject);
      server.listen({ host, port }, () => {
        server.removeListener("error", reject);
        resolve();
      });
    });
  } catch (cause) {
    throw cannotListen(host, port, cause);
  }
  return (server.address() as AddressInfo).port;
}

/** The error of a server that cannot listen. */
export function cannotListen(host: string, port: number, cause: unknown): KvError {
  const { code } = cause as { code?: string };
  const hint =
    code === "EADDRINUSE"
      ? "stop the program that listens there, or choose another port"
      : "choose a host and a port of this machine";
  const message = `the proxy cannot listen on ${host}:${port} (${code ?? cause})`;
  return new KvError("KV_CONFIG_INVALID", message, { hint, cause });
}

/** Stops listening. Idle connections end at once, all others with the answer that they carry. */
export function closeServer(server: Server): Promise<void> {
  return new Promise((resolve) => {
    server.close(() => resolve());
    server.closeIdleConnections();
  });
}
