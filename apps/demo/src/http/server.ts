import { createServer, type IncomingMessage, type RequestListener, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { type Ambient, type AmbientOptions, ambient, KvError } from "@kv/interface";
import Fastify, { type FastifyInstance, type FastifyReply, type FastifyRequest } from "fastify";
import type { EngineToken } from "../engine/request.js";
import { ChatFormat, chatPrompt } from "./chat-response.js";
import { CompletionFormat } from "./completion-response.js";
import { Connections } from "./connections.js";
import { asKvError, errorBody, httpError, publicError, statusOf } from "./error-response.js";
import { EventStream } from "./event-stream.js";
import {
  abortOnDisconnect,
  type GenerationOptions,
  type ResponseFormat,
  type ServedInstance,
  startGeneration,
} from "./generation.js";
import { type HttpLimits, type HttpLimitsInput, httpLimits } from "./limits.js";
import { BodyReader } from "./read-body.js";
import { RefusedRequests } from "./refused-requests.js";
import {
  type ChatBody,
  type CompletionBody,
  charactersOf,
  chatSchema,
  checkTextLength,
  completionSchema,
  onePrompt,
  transferredPrompt,
  validateBody,
} from "./request-body.js";

/** Default of `max_tokens` for chat; `/v1/completions` generates 16 tokens, as vLLM does. */
const CHAT_TOKENS = 256;
const COMPLETION_TOKENS = 16;
const CLOSE_TIMEOUT_MS = 2000;
/** Statuses after which the connection closes: its next bytes may belong to the refused request. */
const CLOSING_STATUSES: readonly number[] = [408, 413, 503];

interface Answer {
  readonly prompt: Pick<GenerationOptions, "prefix" | "promptTokens" | "maxTokens" | "topLogprobs">;
  readonly body: CompletionBody | ChatBody;
  readonly format: ResponseFormat;
}

export interface InstanceServerOptions extends AmbientOptions {
  /** Default: those of `httpLimits`. */
  readonly limits?: HttpLimitsInput | undefined;
  /** Send clients the messages of failures inside the deployment, which may name hosts and ports. Default: false, the code only. */
  readonly exposeErrors?: boolean | undefined;
}

/** The HTTP server of one instance, in the style of OpenAI's API. */
export class InstanceServer {
  readonly #instance: ServedInstance;
  readonly #ambient: Ambient;
  readonly #limits: HttpLimits;
  readonly #exposeErrors: boolean;
  readonly #app: FastifyInstance;
  readonly #connections: Connections;
  readonly #refused: RefusedRequests;

  constructor(instance: ServedInstance, options: InstanceServerOptions = {}) {
    this.#instance = instance;
    this.#ambient = ambient(options);
    this.#limits = httpLimits(options.limits);
    this.#exposeErrors = options.exposeErrors ?? false;
    this.#connections = new Connections(this.#limits);
    this.#app = Fastify({ logger: false, serverFactory: (serve) => this.#createServer(serve) });
    this.#refused = new RefusedRequests(instance.engines[0], this.#ambient);
    this.#limitRequests();
    this.#addErrorHandlers();
    this.#addRoutes();
  }

  #createServer(serve: RequestListener): Server {
    const { headerTimeoutMs, requestTimeoutMs, idleTimeoutMs, maxHeaderBytes } = this.#limits;
    const options = {
      requestTimeout: requestTimeoutMs,
      keepAliveTimeout: idleTimeoutMs,
      headersTimeout: Math.min(headerTimeoutMs, requestTimeoutMs),
      maxHeaderSize: maxHeaderBytes,
      connectionsCheckingInterval: Math.max(10, Math.min(1000, Math.floor(headerTimeoutMs / 4))),
    };
    const server = createServer(options, (request, response) => {
      if (this.#connections.begin(request, response)) serve(request, response);
    });
    return server.on("connection", (socket) => this.#connections.accept(socket));
  }

  #limitRequests(): void {
    const { maxRequests, maxRequestsPerAddress } = this.#limits;
    const bodies = new BodyReader(this.#limits);
    this.#app.removeAllContentTypeParsers();
    this.#app.addContentTypeParser("application/json", (_request: FastifyRequest, payload: IncomingMessage) =>
      bodies.read(payload),
    );
    this.#app.addHook("onRequest", async ({ raw }) => {
      // Probes and metrics are answered under load too.
      if (raw.method !== "POST") return;
      if (this.#connections.requestsOfAddress(raw.socket) > maxRequestsPerAddress)
        throw httpError(
          503,
          `the instance serves ${maxRequestsPerAddress} requests of this address, its limit`,
        );
      if (this.#connections.requests > maxRequests)
        throw httpError(503, `the instance serves ${maxRequests} requests, its limit`);
    });
  }

  #addErrorHandlers(): void {
    const { log } = this.#ambient;
    this.#app.setErrorHandler((thrown, _request, reply) => {
      const status = (thrown as { statusCode?: number }).statusCode;
      const error =
        !KvError.is(thrown) && status !== undefined && status < 500
          ? httpError(status, (thrown as Error).message)
          : asKvError(thrown);
      const httpStatus = statusOf(error);
      // A refusal is the sender's business: a flood of refused requests does not fill the log.
      if (httpStatus >= 500 && error.details.httpStatus === undefined)
        log.error("request-failed", { code: error.code, message: error.message });
      if (httpStatus === 503) void reply.header("retry-after", "1");
      if (CLOSING_STATUSES.includes(httpStatus)) void reply.header("connection", "close");
      return reply.code(httpStatus).send(errorBody(this.#shown(error)));
    });
    this.#app.setNotFoundHandler((request, reply) =>
      reply
        .code(404)
        .send(errorBody(httpError(404, `${request.method} ${request.url.slice(0, 200)} is not served here`))),
    );
  }

  #addRoutes(): void {
    const app = this.#app;
    const instance = this.#instance;
    app.get("/health", (_request, reply) => reply.code(instance.ready() ? 200 : 503).send());
    app.get("/version", () => ({ version: "kv-demo" }));
    app.get("/status", () => instance.status());
    app.get("/metrics", (_request, reply) =>
      reply.type("text/plain; version=0.0.4").send(instance.metrics()),
    );
    app.get("/kv/transfers", () => instance.kvTransfers());
    app.get("/v1/models", () => ({
      object: "list",
      data: instance.modelNames.slice(0, 1).map((id) => ({
        id,
        object: "model",
        created: 0,
        owned_by: "kv-demo",
        max_model_len: instance.maxModelLen,
      })),
    }));
    app.post("/v1/responses", (request) =>
      this.#refused.watch(request.body, () => {
        throw httpError(
          404,
          "/v1/responses is not served here: this engine keeps no responses and no conversations; send the messages to /v1/chat/completions",
        );
      }),
    );
    app.post("/v1/completions", (request, reply) =>
      this.#refused.watch(request.body, () => this.#completion(request, reply))(),
    );
    app.post("/v1/chat/completions", (request, reply) =>
      this.#refused.watch(request.body, () => this.#chat(request, reply))(),
    );
  }

  #shown(error: KvError): KvError {
    return this.#exposeErrors ? error : publicError(error);
  }

  #completion(request: FastifyRequest, reply: FastifyReply): () => Promise<FastifyReply> {
    const { tokenizer, maxModelLen } = this.#instance;
    const body = validateBody(completionSchema, request.body);
    const prompt = onePrompt(body.prompt);
    if (typeof prompt === "string") checkTextLength(prompt.length, maxModelLen, "prompt");
    return this.#submit(request, reply, {
      prompt: {
        prefix: "cmpl",
        promptTokens: typeof prompt === "string" ? Array.from(tokenizer.encode(prompt)) : prompt,
        maxTokens: body.max_tokens ?? COMPLETION_TOKENS,
        topLogprobs: body.logprobs ?? 0,
      },
      body,
      format: new CompletionFormat(body, tokenizer),
    });
  }

  #chat(request: FastifyRequest, reply: FastifyReply): () => Promise<FastifyReply> {
    const { tokenizer, maxModelLen, maxOutputTokens } = this.#instance;
    const body = validateBody(chatSchema, request.body);
    checkTextLength(charactersOf(body), maxModelLen, "messages");
    const promptTokens = transferredPrompt(body) ?? chatPrompt(body, tokenizer);
    const room = Math.max(1, maxModelLen - promptTokens.length);
    return this.#submit(request, reply, {
      prompt: {
        prefix: "chatcmpl",
        promptTokens,
        maxTokens:
          body.max_completion_tokens ?? body.max_tokens ?? Math.min(CHAT_TOKENS, room, maxOutputTokens),
        topLogprobs: body.top_logprobs ?? 0,
      },
      body,
      format: new ChatFormat(body, tokenizer),
    });
  }

  /** Submits the request to the engine. The returned function sends its tokens, streamed or in one response. */
  #submit(request: FastifyRequest, reply: FastifyReply, answer: Answer): () => Promise<FastifyReply> {
    const instance = this.#instance;
    if (!instance.ready()) {
      throw new KvError("KV_ENGINE_FAILED", "the instance is shutting down", {
        details: { httpStatus: 503 },
      });
    }
    const { body, format, prompt } = answer;
    const isStream = body.stream === true;
    let stream: EventStream | undefined;
    let isFirst = true;
    // The stream opens with the first token: until then an error gets a status code of its own.
    const openStream = () => {
      reply.hijack();
      return new EventStream(reply.raw, generation.id, this.#limits.maxUnreadBytes);
    };
    const sendToken = (token: EngineToken): void => {
      const text = format.text.push(token.token);
      if (!isStream) return;
      stream ??= openStream();
      stream.send(format.chunk(generation, token, text, isFirst));
      isFirst = false;
    };
    // The engine samples the first token in a later step, so `generation` is set when `sendToken` runs.
    const generation = startGeneration(body, {
      ...prompt,
      instance,
      headers: request.headers,
      uuid: this.#ambient.random.uuid,
      onToken: sendToken,
      isStopped: () => format.text.stopped !== undefined,
    });
    abortOnDisconnect(reply.raw, generation.handle);
    return async () => {
      try {
        const result = await generation.handle.done;
        if (!isStream) {
          void reply.header("x-request-id", generation.id);
          return reply.send(format.whole(generation, result));
        }
        stream ??= openStream();
        stream.send(format.finalChunk(generation, result));
        if (body.stream_options?.include_usage === true) stream.send(format.usageChunk(generation, result));
        stream.end();
      } catch (error) {
        if (stream === undefined) throw error;
        stream.fail(this.#shown(asKvError(error)));
      }
      return reply;
    };
  }

  /** Starts listening; port 0 takes a free one. Errors: `KV_CONFIG_INVALID` when the port is in use. */
  async listen({ host, port }: { host: string; port: number }): Promise<{ port: number; url: string }> {
    try {
      await this.#app.listen({ host, port });
    } catch (cause) {
      const reason = (cause as { code?: string }).code ?? String(cause);
      throw new KvError("KV_CONFIG_INVALID", `the instance cannot listen on ${host}:${port} (${reason})`, {
        hint: "stop the program that listens there, or choose another port (0 takes a free one)",
        cause,
      });
    }
    const address = this.#app.server.address() as AddressInfo;
    const name = host.includes(":") ? `[${host}]` : host;
    return { port: address.port, url: `http://${name}:${address.port}` };
  }

  /** Closes idle connections at once, and the others when their response has been sent or after two seconds. */
  async close(): Promise<void> {
    const timeout = this.#ambient.clock.setTimer(() => this.#connections.closeAll(), CLOSE_TIMEOUT_MS);
    const closed = this.#app.close();
    this.#connections.closeIdle();
    await closed;
    timeout.cancel();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}
