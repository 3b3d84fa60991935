import { readFile } from "node:fs/promises";
import type { IncomingMessage, ServerResponse } from "node:http";
import { HttpServer, overloaded, send, sendJson, shortened, type Turn } from "@kv/http";
import { type Clock, KvError, type Timer } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import type { RequestSummary } from "../telemetry/request-history.js";
import { INSTANCE_CHANGES, type InstanceChange } from "./instance-changes.js";
import { checkAdminRequest, requireToken } from "./limits/admin-origin.js";

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
const { connections, bodyLengthBytes, requestMs } = ADMIN_LIMITS;
const LIMITS = {
  ...ADMIN_LIMITS,
  pipelinedRequests: 0,
  headersMs: requestMs,
  receiveMs: requestMs,
  keepAliveMs: 5_000,
};
const BODY_LIMITS = {
  bodyLengthBytes,
  bodiesLengthBytes: connections * bodyLengthBytes,
  bodiesPerClientLengthBytes: connections * bodyLengthBytes,
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
  readonly #http: HttpServer;
  readonly #streams = new Set<ServerResponse>();

  constructor(options: AdminServerOptions) {
    this.#options = options;
    const { clock } = options;
    this.#http = new HttpServer({
      limits: LIMITS,
      bodies: BODY_LIMITS,
      clock,
      serve: (turn) => this.#serve(turn),
    });
  }

  /** Resolves with the port. Errors: `KV_CONFIG_INVALID` when it cannot listen there. */
  listen(host: string, port: number): Promise<number> {
    return this.#http.listen(host, port);
  }

  /** Ends all connections. */
  close(): Promise<void> {
    return this.#http.close();
  }

  async #serve(turn: Turn): Promise<void> {
    const { request, response, path, query } = turn;
    const { settings, page, operations } = this.#options;
    response.setHeader("cache-control", "no-store");
    checkAdminRequest(request.headers, settings);
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
    if (request.method === "POST" && change !== undefined) return this.#changeInstance(change, turn);
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

  async #changeInstance(change: InstanceChange, turn: Turn): Promise<void> {
    const { operations } = this.#options;
    await this.#http.withJson(turn, async (body) =>
      sendJson(turn.response, 200, await operations.changeInstance(change, body)),
    );
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
