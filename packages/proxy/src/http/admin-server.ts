import { readFile } from "node:fs/promises";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { Socket } from "node:net";
import { BodyBudget, overloaded, shortened, statusOf } from "@kv/fleet/front-end";
import { type Clock, KvError, type Timer } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import type { RequestSummary } from "../telemetry/request-history.js";
import { refuseConnection, sendEarlyError, sendError, sendParserError } from "./error-response.js";
import { INSTANCE_CHANGES, type InstanceChange } from "./instance-changes.js";
import { checkAdminRequest, requireToken } from "./limits/admin-origin.js";
import { ClientConnections } from "./limits/client-connections.js";
import { checkRequestHead, targetOf } from "./limits/request-head.js";
import { parseBody, readJsonBody } from "./read-body.js";
import { send, sendJson } from "./send-json.js";
import { closeServer, listen } from "./server.js";

export interface AdminServerOptions {
  readonly settings: NonNullable<ProxySettings["admin"]>;
  /** File of the page. */
  readonly page: URL;
  readonly clock: Clock;
  readonly operations: AdminOperations;
}

/** What the admin routes show and change: one process, or all workers together. */
export interface AdminOperations {
  /** The JSON of `/status`. */
  status(): object | Promise<object>;
  /** The requests that ended last, oldest first. */
  requests(): readonly RequestSummary[] | Promise<readonly RequestSummary[]>;
  /** Calls `listener` with each request that ends, and returns a function that ends that. Without it, `requests` is asked every second. */
  subscribe?(listener: (summary: RequestSummary) => void): () => void;
  metrics(): Promise<{ readonly contentType: string; readonly text: string }>;
  /** As the function `changeInstance`. */
  changeInstance(change: InstanceChange, body: unknown): Promise<object>;
}

/** Limits of the admin listener. They have no settings: operators are few. */
export const ADMIN_LIMITS = {
  bodyLengthBytes: 64 * 1024,
  headersLengthBytes: 16 * 1024,
  connections: 128,
  connectionsPerAddress: 64,
  eventStreams: 32,
  requestMs: 10_000,
} as const;
const BODY_LIMITS = {
  bodyLengthBytes: ADMIN_LIMITS.bodyLengthBytes,
  bodyDepth: 32,
  bodyMembers: 1_000,
  bodyValues: 10_000,
};
const STATUS_EVERY_MS = 1_000;
/** Routes beside the page and the changes of instances. */
const ROUTES = ["/status", "/requests", "/metrics", "/events"] as const;

/** The HTTP server for operators: instances, status, metrics, and the page. All routes except the page's file require the token. */
export class AdminServer {
  readonly #options: AdminServerOptions;
  readonly #server: Server;
  readonly #connections: ClientConnections;
  readonly #budget: BodyBudget;
  readonly #streams = new Set<ServerResponse>();

  constructor(options: AdminServerOptions) {
    this.#options = options;
    const { clock } = options;
    const allBytes = ADMIN_LIMITS.connections * ADMIN_LIMITS.bodyLengthBytes;
    this.#budget = new BodyBudget({ allBytes, perClientBytes: allBytes });
    this.#connections = new ClientConnections({
      all: ADMIN_LIMITS.connections,
      perAddress: ADMIN_LIMITS.connectionsPerAddress,
      pipelined: 0,
      refuse: refuseConnection,
    });
    this.#server = createServer({
      maxHeaderSize: ADMIN_LIMITS.headersLengthBytes,
      connectionsCheckingInterval: 2_000,
      requestTimeout: ADMIN_LIMITS.requestMs,
      headersTimeout: ADMIN_LIMITS.requestMs,
    });
    this.#server.on("connection", (socket) => this.#connections.accept(socket));
    this.#server.on("request", (request, response) =>
      this.#connections.takeTurn(request, response, () => this.#serve(request, response)),
    );
    this.#server.on("clientError", (error, socket) => sendParserError(error, socket as Socket, clock));
  }

  /** Resolves with the port. Errors: `KV_CONFIG_INVALID` when it cannot listen there. */
  listen(host: string, port: number): Promise<number> {
    return listen(this.#server, host, port);
  }

  /** Ends all connections. */
  async close(): Promise<void> {
    const closed = closeServer(this.#server);
    this.#server.closeAllConnections();
    await closed;
  }

  #serve(request: IncomingMessage, response: ServerResponse): void {
    response.setHeader("cache-control", "no-store");
    this.#connections.received(request);
    this.#route(request, response).catch((thrown: unknown) => {
      const error = KvError.from(thrown, "KV_INTERNAL", "the proxy failed");
      if (response.headersSent || response.destroyed) response.destroy();
      else if (request.complete) sendError(response, error);
      else sendEarlyError(request, response, error, this.#options.clock);
    });
  }

  async #route(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const { settings, page, operations } = this.#options;
    checkRequestHead(request);
    checkAdminRequest(request.headers, settings);
    const { path, query } = targetOf(request.url ?? "");
    if (request.method === "GET" && path === "/") {
      response.setHeader(
        "content-security-policy",
        "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
      );
      return send(response, 200, "text/html; charset=utf-8", await readFile(page));
    }
    // EventSource cannot send a header, so the page's stream has the token in its query.
    requireToken(request.headers.authorization, settings.token, new URLSearchParams(query).get("token"));
    const change = INSTANCE_CHANGES.find((each) => path === `/instances/${each}`);
    if (request.method === "POST" && change !== undefined)
      return this.#changeInstance(change, request, response);
    const route = request.method === "GET" ? ROUTES.find((each) => each === path) : undefined;
    switch (route) {
      case "/status":
        return sendJson(response, 200, await operations.status());
      case "/requests":
        return sendJson(response, 200, await operations.requests());
      case "/metrics": {
        const { contentType, text } = await operations.metrics();
        return send(response, 200, contentType, text);
      }
      case "/events":
        return this.#follow(response);
      case undefined:
        throw notFound(request);
    }
  }

  async #changeInstance(
    change: InstanceChange,
    request: IncomingMessage,
    response: ServerResponse,
  ): Promise<void> {
    const client = this.#connections.addressOf(request.socket);
    const body = await readJsonBody(request, { limits: BODY_LIMITS, budget: this.#budget, client }).catch(
      (error: unknown) => {
        throw statusOf(KvError.from(error, "KV_INTERNAL", "the proxy failed")) === 413 ? tooLarge() : error;
      },
    );
    try {
      sendJson(response, 200, await this.#options.operations.changeInstance(change, await parseBody(body)));
    } finally {
      body.share.end();
    }
  }

  #follow(response: ServerResponse): void {
    if (this.#streams.size >= ADMIN_LIMITS.eventStreams) throw tooManyStreams();
    this.#streams.add(response);
    response.once("close", () => this.#streams.delete(response));
    streamEvents(this.#options, response);
  }
}

function notFound({ method, url = "" }: IncomingMessage): KvError {
  return new KvError("KV_REQUEST_INVALID", `there is no admin route ${method} ${shortened(url)}`, {
    hint: "the routes are GET /, /status, /requests, /events, /metrics, POST /instances/add, /instances/drain, /instances/remove",
    details: { httpStatus: 404 },
  });
}

function tooLarge(): KvError {
  const message = `the body is larger than ${ADMIN_LIMITS.bodyLengthBytes} bytes, the limit of admin routes`;
  return new KvError("KV_REQUEST_INVALID", message, {
    hint: "send one instance at a time",
    details: { httpStatus: 413 },
  });
}

function tooManyStreams(): KvError {
  return overloaded({
    limit: "admin event streams",
    message: `${ADMIN_LIMITS.eventStreams} pages follow the events, which is the limit`,
    byClient: false,
    retryAfterSeconds: 10,
    hint: "close a page",
  });
}

function streamEvents({ clock, operations }: AdminServerOptions, response: ServerResponse): void {
  let timer: Timer | undefined;
  let closed = false;
  const send = (event: string, data: unknown) => {
    // A reader that is too slow misses events; they are not kept in memory for it.
    if (response.writableLength < 1024 * 1024)
      response.write(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`);
  };
  const tick = async (isFirst: boolean) => {
    if (isFirst || operations.subscribe === undefined) send("requests", await operations.requests());
    send("status", await operations.status());
    if (!closed)
      timer = clock.setTimer(() => void tick(false).catch(() => response.destroy()), STATUS_EVERY_MS);
  };
  response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-store" });
  const unsubscribe = operations.subscribe?.((summary) => send("request", summary));
  response.on("error", () => {});
  response.once("close", () => {
    closed = true;
    unsubscribe?.();
    timer?.cancel();
  });
  tick(true).catch(() => response.destroy());
}
