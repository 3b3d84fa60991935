import { readFile } from "node:fs/promises";
import { createServer, type ServerResponse } from "node:http";
import type { InstancePool, Role } from "@kv/fleet";
import { type Ambient, KvError, type Timer } from "@kv/interface";
import Fastify, { type FastifyInstance, type FastifyRequest } from "fastify";
import type { ProxySettings } from "../config/settings.js";
import type { PrometheusMetrics } from "../telemetry/prometheus.js";
import type { RequestHistory } from "../telemetry/request-history.js";
import { errorBody, refuseConnection, sendParserError, statusOf } from "./error-response.js";
import { changeInstance, INSTANCE_CHANGES } from "./instance-changes.js";
import { checkAdminRequest, requireToken } from "./limits/admin-origin.js";
import { ClientConnections } from "./limits/client-connections.js";
import { overloaded } from "./limits/overloaded.js";

export interface AdminServerOptions {
  readonly settings: NonNullable<ProxySettings["admin"]>;
  /** File of the page. */
  readonly page: URL;
  readonly ambient: Ambient;
  readonly pools: Readonly<Record<Role, InstancePool>>;
  /** The JSON of `/status`. */
  readonly status: () => object;
  readonly history: RequestHistory;
  readonly prometheus: PrometheusMetrics;
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
const BODY_LIMIT_BYTES = ADMIN_LIMITS.bodyLengthBytes;
const STATUS_EVERY_MS = 1_000;

/** The HTTP server for operators: instances, status, metrics, and the page. All routes except the page's file require the token. */
export function createAdminServer(options: AdminServerOptions): FastifyInstance {
  const { pools, status, prometheus, history, settings, ambient } = options;
  const connections = new ClientConnections({
    all: ADMIN_LIMITS.connections,
    perAddress: ADMIN_LIMITS.connectionsPerAddress,
    pipelined: 0,
    refuse: refuseConnection,
  });
  const app = Fastify({
    logger: false,
    bodyLimit: BODY_LIMIT_BYTES,
    forceCloseConnections: true,
    clientErrorHandler: (error, socket) => sendParserError(error, socket, ambient.clock),
    serverFactory: (handler) =>
      createServer(
        {
          maxHeaderSize: ADMIN_LIMITS.headersLengthBytes,
          connectionsCheckingInterval: 2_000,
          headersTimeout: ADMIN_LIMITS.requestMs,
          requestTimeout: ADMIN_LIMITS.requestMs,
        },
        (request, response) => connections.takeTurn(request, response, () => handler(request, response)),
      ).on("connection", (socket) => connections.accept(socket)),
  });
  // A form of another site may send text/plain without asking the browser's user.
  app.removeContentTypeParser("text/plain");
  const streams = new Set<ServerResponse>();

  app.setErrorHandler((thrown, _request, reply) => {
    const error = fromFastify(thrown, BODY_LIMIT_BYTES);
    return reply.code(statusOf(error)).type("application/json").send(errorBody(error));
  });
  app.setNotFoundHandler(async (request) => {
    throw new KvError("KV_REQUEST_INVALID", `there is no admin route ${request.method} ${request.url}`, {
      hint: "the routes are GET /, /status, /requests, /events, /metrics, POST /instances/add, /instances/drain, /instances/remove",
      details: { httpStatus: 404 },
    });
  });
  app.addHook("onRequest", async (request, reply) => {
    void reply.header("cache-control", "no-store");
    connections.received(request.raw);
    checkAdminRequest(request.headers, settings);
    if (request.routeOptions.url !== "/") authorize(request, settings.token);
  });
  app.addHook("onClose", async () => {
    for (const stream of streams) stream.destroy();
  });

  app.get("/", async (_request, reply) => {
    void reply.header(
      "content-security-policy",
      "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    );
    return reply.type("text/html; charset=utf-8").send(await readFile(options.page));
  });
  app.get("/status", async () => status());
  app.get("/requests", async () => history.list());
  app.get("/metrics", async (_request, reply) =>
    reply.type(prometheus.contentType).send(await prometheus.text()),
  );
  app.get("/events", (_request, reply) => {
    if (streams.size >= ADMIN_LIMITS.eventStreams) throw tooManyStreams();
    reply.hijack();
    streams.add(reply.raw);
    reply.raw.once("close", () => streams.delete(reply.raw));
    streamEvents(options, reply.raw);
  });

  for (const change of INSTANCE_CHANGES)
    app.post(`/instances/${change}`, (request) => changeInstance(change, request.body, pools));
  return app;
}

function authorize(request: FastifyRequest, token: string | undefined): void {
  const { token: queryToken } = request.query as { token?: unknown };
  // EventSource cannot send a header, so the page's stream has the token in its query.
  requireToken(request.headers.authorization, token, queryToken);
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

function streamEvents({ ambient, history, status }: AdminServerOptions, response: ServerResponse): void {
  const { clock } = ambient;
  let timer: Timer | undefined;
  const send = (event: string, data: unknown) => {
    // A reader that is too slow misses events; they are not kept in memory for it.
    if (response.writableLength < 1024 * 1024)
      response.write(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`);
  };
  const tick = () => {
    send("status", status());
    timer = clock.setTimer(tick, STATUS_EVERY_MS);
  };
  response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-store" });
  send("requests", history.list());
  tick();
  const unsubscribe = history.subscribe((summary) => send("request", summary));
  response.on("error", () => {});
  response.once("close", () => {
    unsubscribe();
    timer?.cancel();
  });
}

/** An error that fastify has found in a request, as a `KvError` with its HTTP status. */
function fromFastify(thrown: unknown, bodyLimitBytes: number): KvError {
  if (KvError.is(thrown)) return thrown;
  const { statusCode, code, message } = thrown as { statusCode?: number; code?: string; message?: string };
  const httpStatus = statusCode ?? 500;
  const details = { httpStatus, reason: code };
  if (httpStatus === 413) {
    const message = `the body is larger than ${bodyLimitBytes} bytes, the limit of admin routes`;
    return new KvError("KV_REQUEST_INVALID", message, { hint: "send one instance at a time", details });
  }
  if (httpStatus === 415) {
    const hint = "send content-type: application/json";
    return new KvError("KV_REQUEST_INVALID", "the content type of the body is not JSON", { hint, details });
  }
  if (httpStatus >= 500) {
    return new KvError("KV_INTERNAL", message ?? "the proxy failed", { details, cause: thrown });
  }
  return new KvError("KV_REQUEST_INVALID", message ?? "the request cannot be read", {
    details,
    cause: thrown,
  });
}
