import { readFile } from "node:fs/promises";
import type { IncomingMessage, ServerResponse } from "node:http";
import { HttpServer, httpUrl, overloaded, send, sendJson, shortened, type Turn } from "@kv/http";
import { type Clock, KvError, type Timer } from "@kv/interface";
import { type AdminHosts, checkAdminRequest, requireToken } from "./admin-origin.js";
import { INSTANCE_CHANGES, type InstanceChange } from "./instance-changes.js";

/** Options of `AdminServer`. */
export interface AdminServerOptions {
  /**
   * Where it listens, and whom it serves. Without `allowedHosts` a request may come from anywhere:
   * for routes that change nothing.
   */
  readonly settings: { readonly port: number } & (
    | AdminHosts
    | { readonly host: string; readonly token?: undefined; readonly allowedHosts?: undefined }
  );
  readonly clock: Clock;
  readonly operations: AdminOperations;
}

/**
 * What the admin routes show and change: one process, or all workers together. What is absent has
 * no route.
 */
export interface AdminOperations {
  status(): object | Promise<object>;
  readonly metrics: { readonly contentType: string; text(): Promise<string> };
  health?(): Promise<{ readonly ok: boolean; readonly body: object }>;
  readonly page?: PageOperations | undefined;
  changeInstance?(change: InstanceChange, body: unknown): Promise<object>;
}

/** What the page shows besides the status. */
export interface PageOperations {
  readonly file: URL;
  /** The requests that ended last, oldest first. */
  requests(): readonly object[] | Promise<readonly object[]>;
  /** The requests that run, oldest first. */
  running(): readonly object[] | Promise<readonly object[]>;
  /**
   * Calls `listener` with each request that ends, and returns a function that ends that. Without
   * it, `requests` is asked every second.
   */
  subscribe?(listener: (summary: object) => void): () => void;
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

/**
 * The HTTP server for operators: status, metrics, health, changes of instances, and a page. All
 * routes except the page's file require the token.
 */
export class AdminServer {
  readonly #options: AdminServerOptions;
  readonly #http: HttpServer;
  readonly #streams = new Set<ServerResponse>();
  readonly #routes = new Map<string, (turn: Turn) => Promise<void>>();

  constructor(options: AdminServerOptions) {
    this.#options = options;
    this.#addRoutes();
    const { clock } = options;
    this.#http = new HttpServer({
      limits: LIMITS,
      bodies: BODY_LIMITS,
      clock,
      serve: (turn) => this.#serve(turn),
    });
  }

  /**
   * Resolves with the URL.
   *
   * @throws `KV_CONFIG_INVALID` when it cannot listen there.
   */
  async listen(): Promise<string> {
    const { host, port } = this.#options.settings;
    return httpUrl(host, await this.#http.listen(host, port));
  }

  close(): Promise<void> {
    return this.#http.close();
  }

  async #serve(turn: Turn): Promise<void> {
    const { request, response, path, query } = turn;
    const { settings, operations } = this.#options;
    const { page } = operations;
    response.setHeader("cache-control", "no-store");
    if (settings.allowedHosts !== undefined) checkAdminRequest(request.headers, settings);
    if (page !== undefined && request.method === "GET" && path === "/") {
      response.setHeader(
        "content-security-policy",
        "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
      );
      return send(response, 200, "text/html; charset=utf-8", await readFile(page.file));
    }
    // EventSource cannot send a header, so the page's stream has the token in its query.
    requireToken(
      request.headers.authorization,
      settings.token,
      new URLSearchParams(query).get("token"),
    );
    const serve = this.#routes.get(`${request.method} ${path}`);
    if (serve === undefined) throw this.#notFound(request);
    await serve(turn);
  }

  #addRoutes(): void {
    const { status, metrics, health, page, changeInstance } = this.#options.operations;
    this.#routes.set("GET /status", async ({ response }) =>
      sendJson(response, 200, await status()),
    );
    this.#routes.set("GET /metrics", async ({ response }) => {
      send(response, 200, metrics.contentType, await metrics.text());
    });
    if (health !== undefined)
      this.#routes.set("GET /health", async ({ response }) => {
        const { ok, body } = await health();
        sendJson(response, ok ? 200 : 503, body);
      });
    if (page !== undefined) {
      const requests = async ({ response }: Turn) => sendJson(response, 200, await page.requests());
      this.#routes.set("GET /requests", requests);
      this.#routes.set("GET /events", async ({ response }) => this.#follow(page, response));
    }
    if (changeInstance === undefined) return;
    for (const change of INSTANCE_CHANGES)
      this.#routes.set(`POST /instances/${change}`, (turn) =>
        this.#http.withJson(turn, async (body) =>
          sendJson(turn.response, 200, await changeInstance(change, body)),
        ),
      );
  }

  #notFound({ method, url = "" }: IncomingMessage): KvError {
    const routes = [
      ...(this.#options.operations.page === undefined ? [] : ["GET /"]),
      ...this.#routes.keys(),
    ];
    return new KvError(
      "KV_REQUEST_INVALID",
      `there is no admin route ${method} ${shortened(url)}`,
      {
        hint: `the routes are ${routes.join(", ")}`,
        details: { httpStatus: 404 },
      },
    );
  }

  #follow({ requests, running, subscribe }: PageOperations, response: ServerResponse): void {
    if (this.#streams.size >= ADMIN_LIMITS.eventStreams)
      throw overloaded({
        limit: "admin event streams",
        message: `${ADMIN_LIMITS.eventStreams} pages follow the events, which is the limit`,
        byClient: false,
        retryAfterSeconds: 10,
        hint: "close a page",
      });
    this.#streams.add(response);
    const { clock, operations } = this.#options;
    let timer: Timer | undefined;
    let closed = false;
    const send = (event: string, data: unknown) => {
      // A reader that is too slow misses events; they are not kept in memory for it.
      if (response.writableLength < 1024 * 1024)
        response.write(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`);
    };
    const tick = async (isFirst: boolean) => {
      if (isFirst || subscribe === undefined) send("requests", await requests());
      send("running", await running());
      send("status", await operations.status());
      if (!closed)
        timer = clock.setTimer(
          () => void tick(false).catch(() => response.destroy()),
          STATUS_EVERY_MS,
        );
    };
    response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-store" });
    const unsubscribe = subscribe?.((summary) => send("request", summary));
    response.on("error", () => {});
    response.once("close", () => {
      closed = true;
      this.#streams.delete(response);
      unsubscribe?.();
      timer?.cancel();
    });
    tick(true).catch(() => response.destroy());
  }
}
