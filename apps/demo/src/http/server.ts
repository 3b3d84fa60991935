import type { ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { type Ambient, type AmbientOptions, ambient, KvError } from "@kv/interface";
import Fastify, { type FastifyInstance, type FastifyReply, type FastifyRequest } from "fastify";
import type { EngineToken } from "../engine/request.js";
import { ChatFormat, chatPrompt } from "./chat-response.js";
import { CompletionFormat } from "./completion-response.js";
import { ConnectionTracker } from "./connection-tracker.js";
import { asKvError, errorBody, httpError, statusOf } from "./error-response.js";
import {
  abortOnDisconnect,
  type GenerationOptions,
  type ResponseFormat,
  type ServedInstance,
  startGeneration,
} from "./generation.js";
import {
  type ChatBody,
  type CompletionBody,
  chatSchema,
  completionSchema,
  onePrompt,
  readBody,
} from "./request-body.js";

/** Default of `max_tokens` for chat; `/v1/completions` generates 16 tokens, as vLLM does. */
const CHAT_TOKENS = 256;
const COMPLETION_TOKENS = 16;
const CLOSE_TIMEOUT_MS = 2000;
const MAX_BODY_BYTES = 64 << 20;

interface Answer {
  readonly prompt: Pick<GenerationOptions, "prefix" | "promptTokens" | "maxTokens" | "topLogprobs">;
  readonly body: CompletionBody | ChatBody;
  readonly format: ResponseFormat;
}

/** The HTTP server of one instance, in the style of OpenAI's API. */
export class InstanceServer {
  readonly #instance: ServedInstance;
  readonly #ambient: Ambient;
  readonly #app: FastifyInstance;
  readonly #connections: ConnectionTracker;

  constructor(instance: ServedInstance, options: AmbientOptions = {}) {
    this.#instance = instance;
    this.#ambient = ambient(options);
    this.#app = Fastify({ logger: false, bodyLimit: MAX_BODY_BYTES });
    this.#connections = new ConnectionTracker(this.#app.server);
    this.#addErrorHandlers();
    this.#addRoutes();
  }

  #addErrorHandlers(): void {
    const { log } = this.#ambient;
    this.#app.setErrorHandler((thrown, _request, reply) => {
      const status = (thrown as { statusCode?: number }).statusCode;
      const error =
        !KvError.is(thrown) && status !== undefined && status < 500
          ? httpError(status, (thrown as Error).message)
          : asKvError(thrown);
      if (statusOf(error) >= 500) log.error("request-failed", { code: error.code, message: error.message });
      return reply.code(statusOf(error)).send(errorBody(error));
    });
    this.#app.setNotFoundHandler((request, reply) =>
      reply.code(404).send(errorBody(httpError(404, `${request.method} ${request.url} is not served here`))),
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
    app.post("/v1/completions", (request, reply) => this.#completion(request, reply));
    app.post("/v1/chat/completions", (request, reply) => this.#chat(request, reply));
  }

  async #completion(request: FastifyRequest, reply: FastifyReply): Promise<FastifyReply> {
    const { tokenizer } = this.#instance;
    const body = readBody(completionSchema, request.body);
    const prompt = onePrompt(body.prompt);
    return await this.#answer(request, reply, {
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

  async #chat(request: FastifyRequest, reply: FastifyReply): Promise<FastifyReply> {
    const { tokenizer, maxModelLen, maxOutputTokens } = this.#instance;
    const body = readBody(chatSchema, request.body);
    const promptTokens = chatPrompt(body, tokenizer);
    const room = Math.max(1, maxModelLen - promptTokens.length);
    return await this.#answer(request, reply, {
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

  /** Submits the request to the engine and sends its tokens, streamed or in one response. */
  async #answer(request: FastifyRequest, reply: FastifyReply, answer: Answer): Promise<FastifyReply> {
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
      return new EventStream(reply.raw, generation.id);
    };
    const sendToken = (token: EngineToken): void => {
      if (!isStream) return;
      stream ??= openStream();
      stream.send(format.chunk(generation, token, isFirst));
      isFirst = false;
    };
    // The engine samples the first token in a later step, so `generation` is set when `sendToken` runs.
    const generation = startGeneration(body, {
      ...prompt,
      instance,
      headers: request.headers,
      uuid: this.#ambient.random.uuid,
      onToken: sendToken,
    });
    abortOnDisconnect(reply.raw, generation.handle);
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
      stream.fail(asKvError(error));
    }
    return reply;
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

/** A response of server-sent events, each a JSON object, ended by `[DONE]`. */
class EventStream {
  readonly #response: ServerResponse;

  constructor(response: ServerResponse, requestId: string) {
    this.#response = response;
    response.writeHead(200, {
      "content-type": "text/event-stream; charset=utf-8",
      "cache-control": "no-cache",
      "x-request-id": requestId,
    });
  }

  send(data: object): void {
    this.#write(JSON.stringify(data));
  }

  end(): void {
    this.#write("[DONE]");
    this.#response.end();
  }

  /** Ends a response that failed after it began; the error is its last event. */
  fail(error: KvError): void {
    this.send(errorBody(error));
    this.end();
  }

  #write(text: string): void {
    if (!this.#response.destroyed) this.#response.write(`data: ${text}\n\n`);
  }
}
