import type { ServerResponse } from "node:http";
import {
  bodyLimits,
  connectionLimits,
  type ErrorAnswer,
  HttpServer,
  httpUrl,
  RequestsInFlight,
  send,
  sendJson,
  type Turn,
} from "@kv/http";
import {
  type Ambient,
  type AmbientOptions,
  ambient,
  KvError,
  type KvTransferParams,
} from "@kv/interface";
import type { EngineToken } from "../engine/request.js";
import { asKvError, errorBody, httpError, publicError, statusOf } from "./error-response.js";
import {
  abortOnDisconnect,
  type GenerationOptions,
  type ServedInstance,
  startGeneration,
} from "./generation.js";
import { type HttpLimits, type HttpLimitsInput, httpLimits } from "./limits.js";
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
import {
  chatFormat,
  chatPrompt,
  completionFormat,
  type ResponseFormat,
} from "./response-format.js";

/** Default of `max_tokens` for chat; `/v1/completions` generates 16 tokens, as vLLM does. */
const CHAT_TOKENS = 256;
const COMPLETION_TOKENS = 16;
const CLOSE_TIMEOUT_MS = 2000;

interface Answer {
  readonly prompt: Pick<GenerationOptions, "prefix" | "promptTokens" | "maxTokens" | "topLogprobs">;
  readonly body: CompletionBody | ChatBody;
  readonly format: ResponseFormat;
}

export interface InstanceServerOptions extends AmbientOptions {
  readonly limits?: HttpLimitsInput | undefined;
  /**
   * Send clients the messages of failures inside the deployment, which may name hosts and ports.
   * Default: false, the code only.
   */
  readonly exposeErrors?: boolean | undefined;
}

export class InstanceServer {
  readonly #instance: ServedInstance;
  readonly #ambient: Ambient;
  readonly #limits: HttpLimits;
  readonly #exposeErrors: boolean;
  readonly #http: HttpServer;
  readonly #inFlight: RequestsInFlight;

  constructor(instance: ServedInstance, options: InstanceServerOptions = {}) {
    this.#instance = instance;
    this.#ambient = ambient(options);
    this.#limits = httpLimits(options.limits);
    this.#exposeErrors = options.exposeErrors ?? false;
    const { maxRequests, maxRequestsPerAddress, maxRequestsPerConnection } = this.#limits;
    this.#inFlight = new RequestsInFlight({ all: maxRequests, perClient: maxRequestsPerAddress });
    this.#http = new HttpServer({
      limits: connectionLimits(this.#limits, maxRequestsPerConnection - 1),
      bodies: bodyLimits(this.#limits),
      clock: this.#ambient.clock,
      serve: (turn) => this.#serve(turn),
      answerError: (error) => this.#answerError(error),
    });
  }

  #answerError(error: KvError): ErrorAnswer {
    const status = statusOf(error);
    // A refusal is the sender's business: a flood of refused requests does not fill the log.
    if (status >= 500 && error.details.httpStatus === undefined)
      this.#ambient.log.error("request-failed", { code: error.code, message: error.message });
    return {
      status,
      headers: status === 503 ? { "retry-after": "1" } : {},
      body: JSON.stringify(errorBody(this.#shown(error))),
    };
  }

  async #serve(turn: Turn): Promise<void> {
    const { request, response, path } = turn;
    const instance = this.#instance;
    switch (`${request.method} ${path}`) {
      case "GET /health":
        response.writeHead(instance.ready() ? 200 : 503).end();
        return;
      case "GET /version":
        return sendJson(response, 200, { version: "kv-demo" });
      case "GET /status":
        return sendJson(response, 200, instance.status());
      case "GET /metrics":
        return send(response, 200, "text/plain; version=0.0.4", instance.metrics());
      case "GET /kv/transfers":
        return sendJson(response, 200, instance.kvTransfers());
      case "GET /v1/models":
        return sendJson(response, 200, { object: "list", data: this.#models() });
      case "GET /is_sleeping":
        return this.#debugOnly(turn, () =>
          sendJson(response, 200, {
            is_sleeping: instance.engines.some(({ sleepMode }) => sleepMode.isOn),
          }),
        );
      case "POST /sleep":
      case "POST /wake_up":
        return this.#debugOnly(turn, async () => {
          // Level 2 lets go of the weights too, and this engine keeps them.
          const level = new URLSearchParams(turn.query).get("level") ?? "1";
          if (level !== "1")
            throw httpError(400, `level ${level.slice(0, 100)} is not supported, only 1`, "level");
          const sleeps = path === "/sleep";
          await Promise.all(
            instance.engines.map(({ sleepMode }) =>
              sleeps ? sleepMode.sleep() : sleepMode.wakeUp(),
            ),
          );
          response.writeHead(200).end();
        });
      case "POST /v1/responses":
        return this.#post(turn, () => {
          throw httpError(
            404,
            "/v1/responses is not served here: this engine keeps no responses and no conversations; send the messages to /v1/chat/completions",
          );
        });
      case "POST /v1/completions":
        return this.#post(turn, (body) => this.#completion(turn, body));
      case "POST /v1/chat/completions":
        return this.#post(turn, (body) => this.#chat(turn, body));
      default:
        throw httpError(404, `${request.method} ${path.slice(0, 200)} is not served here`);
    }
  }

  /** vLLM has these routes in its development mode only. */
  #debugOnly({ request, path }: Turn, serve: () => Promise<void> | void): Promise<void> | void {
    if (this.#instance.debug) return serve();
    throw httpError(404, `${request.method} ${path} needs an instance started with debug`);
  }

  #models(): object[] {
    const { modelNames, maxModelLen } = this.#instance;
    const common = { object: "model", created: 0, owned_by: "kv-demo", max_model_len: maxModelLen };
    return modelNames.slice(0, 1).map((id) => ({ id, ...common }));
  }

  /**
   * Reads a body and submits it. Only these requests are limited: probes and metrics are answered
   * under load too.
   */
  async #post(turn: Turn, submit: (body: unknown) => () => Promise<void>): Promise<void> {
    const slot = this.#inFlight.admit(turn.client);
    turn.response.once("close", () => slot.end());
    const body = await this.#http.withJson(turn, (value) => value);
    let answer: () => Promise<void>;
    try {
      answer = submit(body);
    } catch (error) {
      this.#releaseRefused(body, error);
      throw error;
    }
    await answer();
  }

  /**
   * Notifies the prefill instance that a refused body (4xx) names: no engine has the request, and
   * its blocks are freed. The proxy uses that on purpose: it sends a request that every engine
   * refuses, with the parameters of a prompt that nobody will decode. A refusal that another
   * instance may not repeat (5xx) releases nothing: the proxy tries the next one.
   */
  #releaseRefused(body: unknown, error: unknown): void {
    const status = KvError.is(error) ? statusOf(error) : 500;
    const params = (body as { kv_transfer_params?: unknown } | null | undefined)
      ?.kv_transfer_params;
    const isRefusal = status >= 400 && status < 499;
    if (!isRefusal || typeof params !== "object" || params === null || Array.isArray(params))
      return;
    // The engine of any data-parallel rank.
    const [engine] = this.#instance.engines;
    engine?.releaseRemote(`refused-${this.#ambient.random.uuid()}`, params as KvTransferParams);
  }

  #shown(error: KvError): KvError {
    return this.#exposeErrors ? error : publicError(error);
  }

  #completion(turn: Turn, given: unknown): () => Promise<void> {
    const { tokenizer, maxModelLen } = this.#instance;
    const body = validateBody(completionSchema, given);
    const prompt = onePrompt(body.prompt);
    if (typeof prompt === "string") checkTextLength(prompt.length, maxModelLen, "prompt");
    return this.#submit(turn, {
      prompt: {
        prefix: "cmpl",
        promptTokens: typeof prompt === "string" ? Array.from(tokenizer.encode(prompt)) : prompt,
        maxTokens: body.max_tokens ?? COMPLETION_TOKENS,
        topLogprobs: body.logprobs ?? undefined,
      },
      body,
      format: completionFormat(body, tokenizer),
    });
  }

  #chat(turn: Turn, given: unknown): () => Promise<void> {
    const { tokenizer, maxModelLen, maxOutputTokens } = this.#instance;
    const body = validateBody(chatSchema, given);
    checkTextLength(charactersOf(body), maxModelLen, "messages");
    const promptTokens = transferredPrompt(body) ?? chatPrompt(body, tokenizer);
    const room = Math.max(1, maxModelLen - promptTokens.length);
    return this.#submit(turn, {
      prompt: {
        prefix: "chatcmpl",
        promptTokens,
        maxTokens:
          body.max_completion_tokens ??
          body.max_tokens ??
          Math.min(CHAT_TOKENS, room, maxOutputTokens),
        topLogprobs: body.logprobs === true ? (body.top_logprobs ?? 0) : undefined,
      },
      body,
      format: chatFormat(body, tokenizer),
    });
  }

  /**
   * Submits the request to the engine. The returned function sends its tokens, streamed or in one
   * response.
   */
  #submit({ request, response }: Turn, answer: Answer): () => Promise<void> {
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
    const openStream = () => new EventStream(response, generation.id, this.#limits.maxUnreadBytes);
    const sendToken = (token: EngineToken): void => {
      const text = format.text.push(token.token);
      if (!isStream) return;
      stream ??= openStream();
      stream.send(format.chunk(generation, token, text, isFirst));
      isFirst = false;
    };
    // The engine samples the first token in a later step, so `generation` is set when `sendToken`
    // runs.
    const generation = startGeneration(body, {
      ...prompt,
      instance,
      headers: request.headers,
      uuid: this.#ambient.random.uuid,
      onToken: sendToken,
      isStopped: () => format.text.stopped !== undefined,
    });
    abortOnDisconnect(response, generation.handle);
    return async () => {
      try {
        const result = await generation.handle.done;
        if (!isStream) {
          response.setHeader("x-request-id", generation.id);
          return sendJson(response, 200, format.whole(generation, result));
        }
        stream ??= openStream();
        stream.send(format.finalChunk(generation, result));
        if (body.stream_options?.include_usage === true)
          stream.send(format.usageChunk(generation, result));
        stream.end();
      } catch (error) {
        if (stream === undefined) throw error;
        stream.fail(this.#shown(asKvError(error)));
      }
    };
  }

  async listen({
    host,
    port,
  }: {
    host: string;
    port: number;
  }): Promise<{ port: number; url: string }> {
    const bound = await this.#http.listen(host, port);
    return { port: bound, url: httpUrl(host, bound) };
  }

  /**
   * Closes idle connections at once, and the others when their response has been sent or after two
   * seconds.
   */
  close(): Promise<void> {
    return this.#http.close(CLOSE_TIMEOUT_MS);
  }
}

class EventStream {
  readonly #response: ServerResponse;
  readonly #maxUnreadBytes: number;

  constructor(response: ServerResponse, requestId: string, maxUnreadBytes: number) {
    this.#response = response;
    this.#maxUnreadBytes = maxUnreadBytes;
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
    if (this.#response.destroyed) return;
    this.#response.write(`data: ${text}\n\n`);
    // The client does not read. The close of the response aborts the request.
    if (this.#response.writableLength > this.#maxUnreadBytes) this.#response.destroy();
  }
}
