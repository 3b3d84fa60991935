import {
  createServer as createHttpServer,
  type IncomingMessage,
  type Server,
  type ServerResponse,
} from "node:http";
import { type Clock, KvError } from "@kv/interface";
import { sendEarlyError } from "./early-error.js";
import type { Endpoint } from "./endpoint.js";
import { sendError } from "./error-answer.js";
import type { GenerationRoute } from "./generation-route.js";
import { answerParserError } from "./http-errors.js";
import type { createModelsRoute } from "./models-route.js";
import type { ProxyLimits, ProxyTimeouts } from "./options.js";
import { readJsonBody } from "./request-reader.js";

export interface ServerParts {
  readonly clock: Clock;
  readonly limits: ProxyLimits;
  readonly timeouts: ProxyTimeouts;
  readonly generation: GenerationRoute;
  readonly models: ReturnType<typeof createModelsRoute>;
  readonly newRequestId: () => string;
  readonly isDraining: () => boolean;
  readonly health: () => { readonly ok: boolean; readonly [key: string]: unknown };
  readonly status: () => object;
}

type Handler = (request: IncomingMessage, response: ServerResponse) => Promise<void>;

const GENERATION: readonly Endpoint[] = ["/v1/completions", "/v1/chat/completions", "/v1/responses"];

/** The HTTP surface: routes, limits, and errors in one form. What a route does is its own file's. */
export function createServer(parts: ServerParts): Server {
  const { limits, timeouts, generation, models } = parts;
  const routes = new Map<string, Handler>();

  for (const endpoint of GENERATION) {
    routes.set(`POST ${endpoint}`, async (request, response) => {
      const body = await readJsonBody(request, limits.bodyLengthBytes);
      await generation.serve(endpoint, request.headers, body, response);
    });
  }
  routes.set("GET /v1/models", (request, response) =>
    models(request.url ?? "", parts.newRequestId(), request.headers, response),
  );
  for (const path of ["/health", "/healthcheck"]) {
    routes.set(`GET ${path}`, async (_request, response) => {
      const { ok, ...rest } = parts.health();
      sendJson(response, ok ? 200 : 503, rest);
    });
  }
  routes.set("GET /status", async (_request, response) => sendJson(response, 200, parts.status()));

  const options = {
    maxHeaderSize: limits.headersLengthBytes,
    // How often Node looks for requests that are late: every 30 s if it is not told.
    connectionsCheckingInterval: Math.ceil(Math.min(30_000, timeouts.receiveMs / 4)),
  };
  const server = createHttpServer(options, (request, response) => {
    // A kept connection would go on to a server that is closing.
    if (parts.isDraining()) response.setHeader("connection", "close");
    const path = request.url?.split("?", 1)[0];
    const handler = routes.get(`${request.method} ${path}`) ?? notServed;
    handler(request, response).catch((thrown: unknown) => {
      const error = KvError.from(thrown, "KV_INTERNAL", "the proxy failed");
      if (response.headersSent || response.destroyed) {
        response.destroy();
        return;
      }
      if (request.complete) sendError(response, error);
      else sendEarlyError(request, response, error, parts.clock);
    });
  });
  server.requestTimeout = timeouts.receiveMs;
  server.keepAliveTimeout = timeouts.keepAliveMs;
  server.headersTimeout = Math.min(server.headersTimeout, timeouts.receiveMs);
  server.on("clientError", answerParserError);
  return server;
}

async function notServed(request: IncomingMessage): Promise<void> {
  throw new KvError("KV_REQUEST_INVALID", `${request.method} ${request.url} is not served here`, {
    hint: "served: POST /v1/completions, /v1/chat/completions, /v1/responses, GET /v1/models, /health, /status",
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

/** Errors: what Node says, `EADDRINUSE` and the like. */
export function listen(server: Server, options: { host: string; port: number }): Promise<void> {
  return new Promise((resolve, reject) => {
    server.once("error", reject);
    server.listen(options, () => {
      server.removeListener("error", reject);
      resolve();
    });
  });
}

/** Connections that wait for a next request end at once, others with the answer that they carry. */
export function closeServer(server: Server): Promise<void> {
  return new Promise((resolve) => {
    server.close(() => resolve());
    server.closeIdleConnections();
  });
}
