import { createHash, timingSafeEqual } from "node:crypto";
import { readFile } from "node:fs/promises";
import type { ServerResponse } from "node:http";
import { type Clock, KvError, type Timer } from "@kv/interface";
import Fastify, { type FastifyInstance, type FastifyRequest } from "fastify";
import { z } from "zod";
import { errorBody, statusOf } from "./error-answer.js";
import { fromFastify } from "./http-errors.js";
import { instanceSpec, instanceSpecSchema } from "./instance-spec.js";
import type { InstancePool } from "./instances.js";
import type { Prometheus } from "./prometheus.js";
import type { RecentRequests } from "./recent.js";
import type { Role } from "./upstream.js";

export interface AdminParts {
  readonly token: string | undefined;
  readonly clock: Clock;
  readonly pools: Readonly<Record<Role, InstancePool>>;
  readonly status: () => object;
  readonly recent: RecentRequests;
  readonly prometheus: Prometheus;
}

const BODY_LIMIT_BYTES = 64 * 1024;
const STATUS_EVERY_MS = 1_000;

const changeSchema = z.strictObject({
  role: z.enum(["prefill", "decode"]),
  instance: instanceSpecSchema,
});

/** Routes for operators, on a port of their own: instances, status, metrics, and the page. All but the page's file want the token. */
export function createAdminServer(parts: AdminParts): FastifyInstance {
  const { pools, status, prometheus } = parts;
  const app = Fastify({ logger: false, bodyLimit: BODY_LIMIT_BYTES, forceCloseConnections: true });
  const streams = new Set<ServerResponse>();

  app.setErrorHandler((thrown, _request, reply) => {
    const error = fromFastify(thrown, BODY_LIMIT_BYTES);
    return reply.code(statusOf(error)).type("application/json").send(errorBody(error));
  });
  app.setNotFoundHandler(async (request) => {
    throw new KvError("KV_REQUEST_INVALID", `${request.method} ${request.url} is not an admin route`, {
      hint: "these are: GET /, /status, /requests, /events, /metrics, POST /instances/add, /instances/drain, /instances/remove",
      details: { httpStatus: 404 },
    });
  });
  app.addHook("onRequest", async (request, reply) => {
    void reply.header("cache-control", "no-store");
    if (request.routeOptions.url !== "/") authorize(request, parts.token);
  });
  app.addHook("onClose", async () => {
    for (const stream of streams) stream.destroy();
  });

  app.get("/", async (_request, reply) => {
    void reply.header(
      "content-security-policy",
      "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    );
    return reply
      .type("text/html; charset=utf-8")
      .send(await readFile(new URL("../page/index.html", import.meta.url)));
  });
  app.get("/status", async () => status());
  app.get("/requests", async () => parts.recent.list());
  app.get("/metrics", async (_request, reply) =>
    reply.type(prometheus.contentType).send(await prometheus.text()),
  );
  app.get("/events", (_request, reply) => {
    reply.hijack();
    streams.add(reply.raw);
    reply.raw.once("close", () => streams.delete(reply.raw));
    streamEvents(parts, reply.raw);
  });

  app.post("/instances/add", async (request) => {
    const { role, spec } = readChange(request.body);
    pools[role].add(spec);
    return pools[role].status();
  });
  app.post("/instances/drain", async (request) => {
    const { role, spec } = readChange(request.body);
    // Not waited for: a stream may last for an hour. `/status` shows what is in flight.
    await begun(pools[role].drain(spec));
    return pools[role].status();
  });
  app.post("/instances/remove", async (request) => {
    const { role, spec } = readChange(request.body);
    await begun(pools[role].remove(spec));
    return pools[role].status();
  });

  function readChange(body: unknown): { role: Role; spec: ReturnType<typeof instanceSpec> } {
    const result = changeSchema.safeParse(body);
    if (!result.success) {
      throw new KvError(
        "KV_REQUEST_INVALID",
        `the body is not a change of instances: ${z.prettifyError(result.error)}`,
        {
          hint: 'send {"role": "prefill" or "decode", "instance": "host:port"}',
        },
      );
    }
    const { role, instance } = result.data;
    return { role, spec: instanceSpec(instance) };
  }
  return app;
}

/** Lets a change begin. One of an unknown instance rejects at once, and that is the answer; its end is not waited for. */
async function begun(change: Promise<void>): Promise<void> {
  const later = new Promise<void>((resolve) => setImmediate(resolve));
  await Promise.race([change, later]);
  change.catch(() => {});
}

function authorize(request: FastifyRequest, token: string | undefined): void {
  if (token === undefined) return;
  const { authorization } = request.headers;
  const { token: asked } = request.query as { token?: unknown };
  // EventSource cannot send a header, so the page's stream names the token in its query.
  const given = authorization?.startsWith("Bearer ") === true ? authorization.slice("Bearer ".length) : asked;
  const digest = (text: string) => createHash("sha256").update(text).digest();
  if (typeof given === "string" && timingSafeEqual(digest(given), digest(token))) return;
  throw new KvError("KV_REQUEST_INVALID", "the token of the admin routes is missing or wrong", {
    hint: "send Authorization: Bearer TOKEN",
    details: { httpStatus: 401 },
  });
}

function streamEvents({ clock, recent, status }: AdminParts, response: ServerResponse): void {
  let timer: Timer | undefined;
  const send = (event: string, data: unknown) => {
    // A reader that does not keep up misses events rather than hold them here.
    if (response.writableLength < 1024 * 1024)
      response.write(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`);
  };
  const tick = () => {
    send("status", status());
    timer = clock.setTimer(tick, STATUS_EVERY_MS);
  };
  response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-store" });
  send("requests", recent.list());
  tick();
  const end = recent.subscribe((record) => send("request", record));
  response.on("error", () => {});
  response.once("close", () => {
    end();
    timer?.cancel();
  });
}
