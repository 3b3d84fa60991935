import {
  createServer as createHttpServer,
  type IncomingMessage,
  type Server,
  type ServerResponse,
} from "node:http";
import type { AddressInfo } from "node:net";
import { type Clock, KvError } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import type { Endpoint } from "../request/generation-request.js";
import { sendEarlyError, sendError, sendParserError } from "./error-response.js";
import type { GenerationRoute } from "./generation-route.js";
import type { ModelsRoute } from "./models-route.js";
import { readJsonBody } from "./read-body.js";

export interface ServerOptions {
  readonly clock: Clock;
  readonly settings: Pick<ProxySettings, "limits" | "timeouts">;
  readonly generation: GenerationRoute;
  readonly models: ModelsRoute;
  /** True while the proxy closes. */
  readonly isDraining: () => boolean;
  /** Whether the proxy can serve requests, and the JSON of `/health`. */
  readonly health: () => { readonly ok: boolean; readonly body: object };
  /** The JSON of `/status`. */
  readonly status: () => object;
}

type Handler = (request: IncomingMessage, response: ServerResponse) => Promise<void>;

const ENDPOINTS: readonly Endpoint[] = ["/v1/completions", "/v1/chat/completions", "/v1/responses"];

/** The HTTP server for clients: its routes, its limits, and errors in OpenAI's form. */
export function createServer(options: ServerOptions): Server {
  const { clock, generation, models, isDraining, health, status } = options;
  const { limits, timeouts } = options.settings;
  const routes = new Map<string, Handler>();

  for (const endpoint of ENDPOINTS) {
    routes.set(`POST ${endpoint}`, async (request, response) => {
      const body = await readJsonBody(request, limits.bodyLengthBytes);
      await generation.serve(endpoint, request.headers, body, response);
    });
  }
  routes.set("GET /v1/models", (request, response) => models.serve(request, response));
  const serveHealth: Handler = async (_request, response) => {
    const { ok, body } = health();
    sendJson(response, ok ? 200 : 503, body);
  };
  routes.set("GET /health", serveHealth);
  routes.set("GET /healthcheck", serveHealth);
  routes.set("GET /status", async (_request, response) => sendJson(response, 200, status()));

  const httpOptions = {
    maxHeaderSize: limits.headersLengthBytes,
    // How often Node searches for requests that are late; its default is 30 s.
    connectionsCheckingInterval: Math.ceil(Math.min(30_000, timeouts.receiveMs / 4)),
  };
  const server = createHttpServer(httpOptions, (request, response) => {
    // A client that keeps its connection would send its next request to a server that is closing.
    if (isDraining()) response.setHeader("connection", "close");
    const path = request.url?.split("?", 1)[0];
    const handler = routes.get(`${request.method} ${path}`) ?? notFound;
    handler(request, response).catch((thrown: unknown) => {
      const error = KvError.from(thrown, "KV_INTERNAL", "the proxy failed");
      if (response.headersSent || response.destroyed) response.destroy();
      else if (request.complete) sendError(response, error);
      else sendEarlyError(request, response, error, clock);
    });
  });
  server.requestTimeout = timeouts.receiveMs;
  server.keepAliveTimeout = timeouts.keepAliveMs;
  server.headersTimeout = Math.min(server.headersTimeout, timeouts.receiveMs);
  server.on("clientError", sendParserError);
  return server;
}

async function notFound(request: IncomingMessage): Promise<void> {
  throw new KvError("KV_REQUEST_INVALID", `there is no route ${request.method} ${request.url}`, {
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
