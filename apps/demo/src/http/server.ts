import type { AddressInfo } from "node:net";
import { type Ambient, ambient, KvError } from "@kv/interface";
import Fastify, { type FastifyReply, type FastifyRequest } from "fastify";
import type { EngineToken } from "../engine/request.js";
import { chatForms, chatPrompt } from "./chat.js";
import { type AnswerForms, completionForms } from "./completions.js";
import { trackConnections } from "./connections.js";
import { errorBody, httpError, openEventStream, statusOf } from "./error-answer.js";
import {
  abortWhenGone,
  asKvError,
  beginGeneration,
  type Generation,
  type ServedInstance,
} from "./generation.js";
import {
  type ChatBody,
  type CompletionBody,
  chatSchema,
  completionSchema,
  onePrompt,
  readBody,
} from "./generation-body.js";

export interface InstanceServer {
  /** Port 0 takes a free one. Errors: `KV_CONFIG_INVALID` when the port is taken. */
  listen(options: { host: string; port: number }): Promise<{ port: number; url: string }>;
  /** Ends idle connections at once, and those with an answer under way when it has gone, or after two seconds. */
  close(): Promise<void>;
}

/** Tokens of a chat answer where the client does not say; `/v1/completions` takes 16, as vLLM does. */
const CHAT_TOKENS = 256;
const COMPLETION_TOKENS = 16;
const CLOSE_PATIENCE_MS = 2000;

/** The OpenAI-style HTTP surface of one instance. */
export function createInstanceServer(
  instance: ServedInstance,
  options: Partial<Ambient> = {},
): InstanceServer {
  const { clock, random, log } = ambient(options);
  const app = Fastify({ logger: false, bodyLimit: 64 * 1024 * 1024 });
  const connections = trackConnections(app.server);

  app.setErrorHandler((thrown, _request, reply) => {
    const status = (thrown as { statusCode?: number }).statusCode;
    const error = KvError.is(thrown)
      ? thrown
      : status !== undefined && status < 500
        ? httpError(status, (thrown as Error).message)
        : asKvError(thrown);
    if (statusOf(error) >= 500) log.error("request-failed", { code: error.code, message: error.message });
    return reply.code(statusOf(error)).send(errorBody(error));
  });
  app.setNotFoundHandler((request, reply) =>
    reply.code(404).send(errorBody(httpError(404, `${request.method} ${request.url} is not served here`))),
  );

  app.get("/health", (_request, reply) => reply.code(instance.ready() ? 200 : 503).send());
  app.get("/version", () => ({ version: "kv-demo" }));
  app.get("/status", () => instance.status());
  app.get("/metrics", (_request, reply) => reply.type("text/plain; version=0.0.4").send(instance.metrics()));
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

  app.post("/v1/completions", async (request, reply) => {
    const body = readBody(completionSchema, request.body);
    const prompt = onePrompt(body.prompt);
    const promptTokens = typeof prompt === "string" ? Array.from(instance.tokenizer.encode(prompt)) : prompt;
    await answer(request, reply, body, {
      prefix: "cmpl",
      promptTokens,
      maxTokens: body.max_tokens ?? COMPLETION_TOKENS,
      topLogprobs: body.logprobs ?? 0,
      forms: completionForms(body, instance.tokenizer),
    });
    return reply;
  });
  app.post("/v1/chat/completions", async (request, reply) => {
    const body = readBody(chatSchema, request.body);
    const promptTokens = chatPrompt(body, instance.tokenizer);
    const room = Math.max(1, instance.maxModelLen - promptTokens.length);
    await answer(request, reply, body, {
      prefix: "chatcmpl",
      promptTokens,
      maxTokens:
        body.max_completion_tokens ??
        body.max_tokens ??
        Math.min(CHAT_TOKENS, room, instance.maxOutputTokens),
      topLogprobs: body.top_logprobs ?? 0,
      forms: chatForms(body, instance.tokenizer),
    });
    return reply;
  });

  interface Answer {
    readonly prefix: "cmpl" | "chatcmpl";
    readonly promptTokens: readonly number[];
    readonly maxTokens: number;
    readonly topLogprobs: number;
    readonly forms: AnswerForms;
  }

  async function answer(
    request: FastifyRequest,
    reply: FastifyReply,
    body: CompletionBody | ChatBody,
    { forms, ...given }: Answer,
  ): Promise<void> {
    if (!instance.ready()) {
      throw new KvError("KV_ENGINE_FAILED", "the instance is shutting down", {
        details: { httpStatus: 503 },
      });
    }
    const { headers } = request;
    // Tokens may come before there is a stream to write them to.
    const early: EngineToken[] = [];
    let onToken = (token: EngineToken): void => void early.push(token);
    const generation = beginGeneration(body, {
      ...given,
      instance,
      headers,
      uuid: random.uuid,
      onToken: (token) => onToken(token),
    });
    abortWhenGone(reply.raw, generation.handle);
    if (body.stream !== true) {
      const result = await generation.handle.done;
      void reply.header("x-request-id", generation.id);
      reply.send(forms.whole(generation, result));
      return;
    }
    await stream(reply, body, generation, forms, (listener) => {
      for (const token of early.splice(0)) listener(token);
      onToken = listener;
    });
  }

  async function stream(
    reply: FastifyReply,
    body: CompletionBody | ChatBody,
    generation: Generation,
    forms: AnswerForms,
    listen: (listener: (token: EngineToken) => void) => void,
  ): Promise<void> {
    let events: ReturnType<typeof openEventStream> | undefined;
    // Nothing is sent before the first token: until then a failure has a status code of its own.
    const open = () => {
      if (events === undefined) reply.hijack();
      events ??= openEventStream(reply.raw, generation.id);
      return events;
    };
    let first = true;
    listen((token) => {
      open().send(forms.chunk(generation, token, first));
      first = false;
    });
    try {
      const result = await generation.handle.done;
      open().send(forms.closing(generation, result));
      if (body.stream_options?.include_usage === true) open().send(forms.usage(generation, result));
      open().end();
    } catch (error) {
      if (events === undefined) throw error;
      events.fail(asKvError(error));
    }
  }

  return {
    async listen({ host, port }) {
      try {
        await app.listen({ host, port });
      } catch (cause) {
        const reason = (cause as { code?: string }).code ?? String(cause);
        throw new KvError("KV_CONFIG_INVALID", `the instance cannot listen on ${host}:${port} (${reason})`, {
          hint: "stop what listens there, or choose another port (0 takes a free one)",
          cause,
        });
      }
      const address = app.server.address() as AddressInfo;
      const name = host.includes(":") ? `[${host}]` : host;
      return { port: address.port, url: `http://${name}:${address.port}` };
    },
    async close() {
      const impatience = clock.setTimer(connections.endAll, CLOSE_PATIENCE_MS);
      const closed = app.close();
      connections.endIdle();
      await closed;
      impatience.cancel();
    },
  };
}
