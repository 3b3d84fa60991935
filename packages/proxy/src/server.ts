import { KvError } from "@kv/interface";
import Fastify, { type FastifyInstance } from "fastify";
import type { Endpoint } from "./endpoint.js";
import { errorBody, statusOf } from "./error-answer.js";
import type { GenerationRoute } from "./generation-route.js";
import { answerParserError, fromFastify } from "./http-errors.js";
import type { createModelsRoute } from "./models-route.js";
import type { ProxyLimits, ProxyTimeouts } from "./options.js";

export interface ServerParts {
  readonly limits: ProxyLimits;
  readonly timeouts: ProxyTimeouts;
  readonly generation: GenerationRoute;
  readonly models: ReturnType<typeof createModelsRoute>;
  readonly newRequestId: () => string;
  readonly isDraining: () => boolean;
  readonly health: () => { readonly ok: boolean; readonly [key: string]: unknown };
  readonly status: () => object;
}

const GENERATION: readonly Endpoint[] = ["/v1/completions", "/v1/chat/completions", "/v1/responses"];

/** The HTTP surface: routes, limits, and errors in one form. What a route does is its own file's. */
export function createServer(parts: ServerParts): FastifyInstance {
  const { limits, timeouts, generation, models } = parts;
  const app = Fastify({
    logger: false,
    bodyLimit: limits.bodyLengthBytes,
    requestTimeout: timeouts.receiveMs,
    forceCloseConnections: "idle",
    clientErrorHandler: answerParserError,
    http: { maxHeaderSize: limits.headersLengthBytes },
    exposeHeadRoutes: false,
  });
  app.removeAllContentTypeParsers();
  // As bytes: the body goes on as the client wrote it, which a parsed one could not.
  app.addContentTypeParser("application/json", { parseAs: "buffer" }, (_request, body, done) =>
    done(null, body),
  );

  app.setErrorHandler((thrown, _request, reply) => {
    const error = fromFastify(thrown, limits.bodyLengthBytes);
    return reply.code(statusOf(error)).type("application/json").send(errorBody(error));
  });
  app.setNotFoundHandler((request, reply) => {
    const error = new KvError("KV_REQUEST_INVALID", `${request.method} ${request.url} is not served here`, {
      hint: "served: POST /v1/completions, /v1/chat/completions, /v1/responses, GET /v1/models, /health, /status",
      details: { httpStatus: 404 },
    });
    return reply.code(404).type("application/json").send(errorBody(error));
  });

  for (const endpoint of GENERATION) {
    app.post(endpoint, async (request, reply) => {
      reply.hijack();
      // A kept connection would go on to a server that is closing.
      if (parts.isDraining()) reply.raw.setHeader("connection", "close");
      const body = Buffer.isBuffer(request.body) ? request.body : Buffer.alloc(0);
      await generation.serve(endpoint, request.headers, body, reply.raw);
    });
  }
  app.get("/v1/models", async (request, reply) => {
    reply.hijack();
    await models(request.url, parts.newRequestId(), request.headers, reply.raw);
  });
  for (const path of ["/health", "/healthcheck"]) {
    app.get(path, async (_request, reply) => {
      const { ok, ...rest } = parts.health();
      return reply.code(ok ? 200 : 503).send(rest);
    });
  }
  app.get("/status", async () => parts.status());
  return app;
}
