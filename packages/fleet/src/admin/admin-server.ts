import { createHash, timingSafeEqual } from "node:crypto";
import { readFile } from "node:fs/promises";
import type { IncomingHttpHeaders, IncomingMessage, ServerResponse } from "node:http";
import { isIP } from "node:net";
import {
  HttpServer,
  httpUrl,
  overloaded,
  refusedRequest,
  send,
  sendJson,
  shortened,
  type Turn,
} from "@kv/http";
import type { Clock, KvError } from "@kv/interface";
import { repeat } from "../repeat.js";
import { INSTANCE_CHANGES, type InstanceChange } from "./instance-changes.js";

/** Options of `AdminServer`. */
export interface AdminServerOptions {
  /** Without `allowedHosts`, any request may come, so routes must change nothing. */
  readonly settings: { readonly port: number } & (
    | AdminHosts
    | { readonly host: string; readonly token?: undefined; readonly allowedHosts?: undefined }
  );
  readonly clock: Clock;
  readonly operations: AdminOperations;
}

/** What the admin routes show and change. An absent member has no route. */
export interface AdminOperations {
  status(): object | Promise<object>;
  readonly metrics: { readonly contentType: string; text(): Promise<string> };
  health?(): Promise<{ readonly ok: boolean; readonly body: object }>;
  readonly page?: PageOperations | undefined;
  changeInstance?(change: InstanceChange, body: unknown): Promise<object>;
  /** Further routes, such as `GET /blocks`, which answer JSON. A POST has a JSON body. */
  readonly further?:
    | Readonly<Record<string, (query: URLSearchParams, body: unknown) => object | Promise<object>>>
    | undefined;
}

/** What the page shows besides the status. */
export interface PageOperations {
  readonly file: URL;
  /** Oldest first. */
  requests(): readonly object[] | Promise<readonly object[]>;
  /** Oldest first. */
  running(): readonly object[] | Promise<readonly object[]>;
  /** Called with each request that ends. Without it, `requests` is asked every second. */
  subscribe?(listener: (summary: object) => void): () => void;
}

/** Limits of the admin listener, without settings. */
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

/** The HTTP server for operators. All routes but the page's file need the token. */
export class AdminServer {
  readonly #http: HttpServer;
  readonly #streams = new Set<ServerResponse>();
  readonly #routes = new Map<string, (turn: Turn) => Promise<void>>();

  constructor(private readonly options: AdminServerOptions) {
    const { clock } = options;
    this.#http = new HttpServer({
      limits: LIMITS,
      bodies: BODY_LIMITS,
      clock,
      serve: (turn) => this.#serve(turn),
    });
    this.#addRoutes();
  }

  /** @throws `KV_CONFIG_INVALID` when it cannot listen there. */
  async listen(): Promise<string> {
    const { host, port } = this.options.settings;
    return httpUrl(host, await this.#http.listen(host, port));
  }

  close(): Promise<void> {
    return this.#http.close();
  }

  async #serve(turn: Turn): Promise<void> {
    const { request, response, path, query } = turn;
    const { settings, operations } = this.options;
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
    // EventSource sends no headers, so the token is in the query.
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
    const { status, metrics, health, page, changeInstance, further } = this.options.operations;
    const json = (route: string, answer: (turn: Turn, body: unknown) => object | Promise<object>) =>
      this.#routes.set(route, async (turn) => {
        const serve = async (body: unknown) =>
          sendJson(turn.response, 200, await answer(turn, body));
        await (route.startsWith("POST") ? this.#http.withJson(turn, serve) : serve(undefined));
      });
    json("GET /status", () => status());
    this.#routes.set("GET /metrics", async ({ response }) => {
      send(response, 200, metrics.contentType, await metrics.text());
    });
    if (health !== undefined)
      this.#routes.set("GET /health", async ({ response }) => {
        const { ok, body } = await health();
        sendJson(response, ok ? 200 : 503, body);
      });
    if (page !== undefined) {
      json("GET /requests", () => page.requests());
      this.#routes.set("GET /events", async ({ response }) => this.#follow(page, response));
    }
    for (const [route, answer] of Object.entries(further ?? {}))
      json(route, ({ query }, body) => answer(new URLSearchParams(query), body));
    if (changeInstance === undefined) return;
    for (const change of INSTANCE_CHANGES)
      json(`POST /instances/${change}`, (_, body) => changeInstance(change, body));
  }

  #notFound({ method, url = "" }: IncomingMessage): KvError {
    const routes = [
      ...(this.options.operations.page === undefined ? [] : ["GET /"]),
      ...this.#routes.keys(),
    ];
    return refusedRequest(
      404,
      `there is no admin route ${method} ${shortened(url)}`,
      `the routes are ${routes.join(", ")}`,
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
    const { clock, operations } = this.options;
    const send = (event: string, data: unknown) => {
      // A slow reader misses events instead of filling memory.
      if (response.writableLength < 1024 * 1024)
        response.write(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`);
    };
    response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-store" });
    const unsubscribe = subscribe?.((summary) => send("request", summary));
    response.on("error", () => {});
    let isFirst = true;
    const ticks = repeat(clock, async () => {
      try {
        if (isFirst || subscribe === undefined) send("requests", await requests());
        isFirst = false;
        send("running", await running());
        send("status", await operations.status());
      } catch {
        response.destroy();
      }
      return STATUS_EVERY_MS;
    });
    response.once("close", () => {
      ticks.close();
      this.#streams.delete(response);
      unsubscribe?.();
    });
  }
}

interface AdminHosts {
  readonly host: string;
  readonly token?: string | undefined;
  readonly allowedHosts: readonly string[];
}

/**
 * Refuses what a page of another site can make a browser send: another origin, or a name that
 * points at this machine (DNS rebinding).
 *
 * @throws `KV_REQUEST_INVALID` with the status 403.
 */
function checkAdminRequest(headers: IncomingHttpHeaders, settings: AdminHosts): void {
  const { host = "", origin } = headers;
  const name = host.replace(/:\d+$/, "").toLowerCase();
  if (!isAllowed(name, settings)) {
    throw refusedRequest(
      403,
      `the Host of the request is ${shortened(host)}, which the admin routes do not serve`,
      "use an IP address or localhost, or name the host in admin.allowedHosts (--admin-allowed-host)",
    );
  }
  if (
    origin === undefined ||
    /^https?:\/\/(.*)$/i.exec(origin)?.[1]?.toLowerCase() === host.toLowerCase()
  )
    return;
  throw refusedRequest(
    403,
    `the request comes from a page of another origin, ${shortened(origin)}`,
    "open the page of the admin port itself",
  );
}

function isAllowed(name: string, { host, token, allowedHosts }: AdminHosts): boolean {
  if (isIP(name.replace(/^\[(.*)\]$/, "$1")) !== 0 || name === "localhost") return true;
  if (name === host.toLowerCase() || allowedHosts.some((allowed) => allowed.toLowerCase() === name))
    return true;
  // A page that rebinds a name does not know the token.
  return token !== undefined && allowedHosts.length === 0;
}

/**
 * `otherwise`: a token from outside the header.
 *
 * @throws `KV_REQUEST_INVALID` (401) without the token, if one is set.
 */
export function requireToken(
  authorization: string | undefined,
  token: string | undefined,
  otherwise?: unknown,
): void {
  if (token === undefined) return;
  const received =
    authorization?.startsWith("Bearer ") === true
      ? authorization.slice("Bearer ".length)
      : otherwise;
  const digest = (text: string) => createHash("sha256").update(text).digest();
  if (typeof received === "string" && timingSafeEqual(digest(received), digest(token))) return;
  throw refusedRequest(
    401,
    "the token of the admin routes is missing or wrong",
    "send Authorization: Bearer TOKEN",
  );
}
