import { createHash } from "node:crypto";
import {
  createServer as createHttpServer,
  type IncomingMessage,
  type Server,
  type ServerResponse,
} from "node:http";
import { createServer as createHttpsServer, type ServerOptions as HttpsServerOptions } from "node:https";
import type { AddressInfo, Socket } from "node:net";
import type { Endpoint } from "@kv/fleet/front-end";
import {
  BodyBudget,
  type Certificate,
  type CertificatePair,
  errorForClient,
  refuseConnectorMembers,
  shortened,
} from "@kv/fleet/front-end";
import { type Ambient, KvError } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { applyCors } from "./cors.js";
import type { DecodeRoute } from "./decode-route.js";
import { refuseConnection, sendEarlyError, sendError, sendParserError } from "./error-response.js";
import type { GenerationRoute } from "./generation-route.js";
import { INSTANCE_CHANGES, type InstanceChange } from "./instance-changes.js";
import { requireToken } from "./limits/admin-origin.js";
import { ClientConnections } from "./limits/client-connections.js";
import { checkRequestHead, targetOf } from "./limits/request-head.js";
import type { ResolvedLimits } from "./limits/resolved-limits.js";
import { parseBody, type ReceivedBody, readJsonBody } from "./read-body.js";
import { sendJson } from "./send-json.js";

export interface ServerOptions {
  readonly ambient: Ambient;
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
  /** True while the proxy closes. */
  readonly isDraining: () => boolean;
  /** Finds out whether the proxy can serve requests; with the JSON of `/health`. */
  readonly health: () => Promise<{ readonly ok: boolean; readonly body: object }>;
  /** The JSON of `/status`. */
  readonly status: () => object | Promise<object>;
}

/** A request whose turn it is. */
interface Turn {
  readonly request: IncomingMessage;
  readonly response: ServerResponse;
  /** The client, as limits per client count it. */
  readonly client: string;
  /** The path of the target. */
  readonly path: string;
  /** The query of the target, with its `?`. */
  readonly query: string;
  /** The client waits for `100 Continue` before it sends its body. */
  readonly expectsContinue: boolean;
}

type Handler = (turn: Turn) => Promise<void>;

const ENDPOINTS: readonly Endpoint[] = [
  "/v1/completions",
  "/v1/chat/completions",
  "/v1/responses",
  "/v1/messages",
];
const MODELS_PATH = "/v1/models";
const MODEL_PATH = "/v1/models/";
/** Further routes of vLLM that a sidecar passes on, as it stands on the port of its decode instance: what pickers scrape, and what needs no KV of another instance. */
const PASSED_ON = {
  GET: ["/metrics", "/version", "/load", "/kv_event_sources"],
  POST: ["/tokenize", "/detokenize", ...ENDPOINTS.map((endpoint) => `${endpoint}/render`)],
} as const;

/** The HTTP server for clients: its routes, its limits, and errors in OpenAI's form. */
export function createServer(options: ServerOptions): Server {
  return new ClientServer(options).server;
}

class ClientServer {
  readonly server: Server;
  readonly #options: ServerOptions;
  /** By path, the method and what serves it. */
  readonly #routes = new Map<string, { readonly method: "GET" | "POST"; readonly serve: Handler }>();
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
    this.server = createPlainOrTls(options.certificate, {
      maxHeaderSize: limits.headersLengthBytes,
      // How often Node searches for requests that are late; its default is 30 s.
      connectionsCheckingInterval: Math.ceil(Math.min(30_000, headersMs / 4)),
      handshakeTimeout: headersMs,
    });
    // A limit on the connections whose TLS handshake is under way; the others have theirs in `ClientConnections`.
    if (options.certificate !== undefined) this.server.maxConnections = 2 * limits.connections;
    this.server.requestTimeout = timeouts.receiveMs;
    this.server.keepAliveTimeout = timeouts.keepAliveMs;
    this.server.headersTimeout = headersMs;
    const connected = options.certificate === undefined ? "connection" : "secureConnection";
    this.server.on(connected, (socket: Socket) => this.#connections.accept(socket));
    this.server.on("request", (request, response) => this.#accept(request, response, false));
    this.server.on("checkContinue", (request, response) => this.#accept(request, response, true));
    this.server.on("clientError", (error, socket) => sendParserError(error, socket as Socket, clock));
  }

  #addRoutes(): void {
    const { health, status, settings } = this.#options;
    for (const endpoint of ENDPOINTS)
      this.#routes.set(endpoint, { method: "POST", serve: (turn) => this.#generate(endpoint, turn) });
    const get = (path: string, serve: Handler) => this.#routes.set(path, { method: "GET", serve });
    get(MODELS_PATH, (turn) => this.#passOn(turn));
    get(MODEL_PATH, (turn) =>
      this.#passOn({ ...turn, path: MODELS_PATH }, decoded(turn.path.slice(MODEL_PATH.length))),
    );
    if (settings.sidecar !== undefined) {
      for (const path of PASSED_ON.GET) get(path, (turn) => this.#passOn(turn));
      for (const path of PASSED_ON.POST)
        this.#routes.set(path, { method: "POST", serve: (turn) => this.#passOnWithBody(turn) });
    }
    const serveHealth: Handler = async ({ response }) => {
      const { ok, body } = await health();
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
    const { cors } = this.#options.settings;
    if (cors !== undefined && applyCors(cors.origins, request, response)) return;
    const { path, query } = targetOf(request.url ?? "");
    const route = this.#routes.get(path.startsWith(MODEL_PATH) ? MODEL_PATH : path);
    if (route === undefined) throw notFound(request.method, path);
    if (route.method !== request.method) throw wrongMethod(request.method, path, route.method);
    const client = this.#clientOf(request);
    await route.serve({ request, response, client, path, query, expectsContinue });
  }

  async #generate(endpoint: Endpoint, turn: Turn): Promise<void> {
    const { request, response, client } = turn;
    const { generation } = this.#options;
    generation.check(client);
    const body = await this.#readBody(turn);
    try {
      await generation.serve({ endpoint, headers: request.headers, body, response, client });
    } finally {
      body.share.end();
    }
  }

  /** Has a decode instance answer a GET. */
  #passOn(turn: Turn, modelId?: string): Promise<void> {
    this.#connections.received(turn.request);
    return this.#options.decodeRoute.serve({ ...turn, modelId });
  }

  async #passOnWithBody(turn: Turn): Promise<void> {
    const body = await this.#readBody(turn);
    try {
      const parsed = await parseBody(body);
      refuseConnectorMembers(parsed as Readonly<Record<string, unknown>>);
      await this.#options.decodeRoute.serve({ ...turn, body: JSON.stringify(parsed) });
    } finally {
      body.share.end();
    }
  }

  /** As on the admin port. A page of another site knows no token, and has an origin. */
  async #changeInstance(change: InstanceChange, turn: Turn, token: string | undefined): Promise<void> {
    const { request, response } = turn;
    requireToken(request.headers.authorization, token);
    if (token === undefined && request.headers.origin !== undefined) {
      throw new KvError("KV_REQUEST_INVALID", "instances are not changed by web pages", {
        hint: "send the request without a browser, or set a token (instanceRoutes.token)",
        details: { httpStatus: 403 },
      });
    }
    const body = await this.#readBody(turn);
    try {
      sendJson(response, 200, await this.#options.changeInstance(change, await parseBody(body)));
    } finally {
      body.share.end();
    }
  }

  async #readBody({ request, response, client, expectsContinue }: Turn): Promise<ReceivedBody> {
    const body = await readJsonBody(request, {
      limits: this.#options.limits,
      budget: this.#budget,
      client,
      onAccepted: expectsContinue ? () => response.writeContinue() : undefined,
    });
    this.#connections.received(request);
    return body;
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

function createPlainOrTls(certificate: Certificate | undefined, options: HttpsServerOptions): Server {
  if (certificate === undefined) return createHttpServer(options);
  const secure = ({ certificate: cert, privateKey: key }: CertificatePair) => ({ cert, key });
  const server = createHttpsServer({ ...options, ...secure(certificate.pair) });
  certificate.onChange((pair) => server.setSecureContext(secure(pair)));
  return server;
}

function notFound(method: string | undefined, path: string): KvError {
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
function cannotListen(host: string, port: number, cause: unknown): KvError {
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
