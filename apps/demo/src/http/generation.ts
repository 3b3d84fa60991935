import type { IncomingHttpHeaders, ServerResponse } from "node:http";
import { sendJson, type Turn } from "@kv/http";
import { KvError, readTraceparent } from "@kv/interface";
import { peerTraceparent } from "@kv/protocol";
import type { Engine } from "../engine/engine.js";
import type { EngineHandle } from "../engine/request.js";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";
import { errorBody, httpError } from "./error-response.js";
import {
  chatPrompt,
  chatSchema,
  completionPrompt,
  completionSchema,
  validateBody,
} from "./request-body.js";
import { CHAT, COMPLETION, ResponseFormat } from "./response-format.js";

export interface ServedInstance {
  readonly engines: readonly Engine[];
  readonly tokenizer: Tokenizer;
  readonly modelNames: readonly [string, ...string[]];
  readonly maxModelLen: number;
  readonly maxOutputTokens: number;
  readonly debug: boolean;
  ready(): boolean;
  status(): object;
  metrics(): string;
  kvTransfers(): object;
}

/** Default of `max_tokens` for chat; `/v1/completions` generates 16 tokens, as vLLM does. */
const CHAT_TOKENS = 256;
const COMPLETION_TOKENS = 16;

function readCompletion(given: unknown, { tokenizer, maxModelLen }: ServedInstance) {
  const body = validateBody(completionSchema, given);
  return {
    body,
    prefix: "cmpl",
    promptTokens: completionPrompt(body, tokenizer, maxModelLen),
    maxTokens: body.max_tokens ?? COMPLETION_TOKENS,
    shape: COMPLETION,
  };
}

function readChat(given: unknown, instance: ServedInstance) {
  const { tokenizer, maxModelLen, maxOutputTokens } = instance;
  const body = validateBody(chatSchema, given);
  const promptTokens = chatPrompt(body, tokenizer, maxModelLen);
  const room = Math.max(1, maxModelLen - promptTokens.length);
  const usual = Math.min(CHAT_TOKENS, room, maxOutputTokens);
  return {
    body,
    prefix: "chatcmpl",
    promptTokens,
    maxTokens: body.max_completion_tokens ?? body.max_tokens ?? usual,
    shape: CHAT,
  };
}

export const GENERATION_ROUTES = {
  "/v1/completions": readCompletion,
  "/v1/chat/completions": readChat,
};

export interface GenerationOptions {
  readonly uuid: () => string;
  readonly maxUnreadBytes: number;
  readonly exposeErrors: boolean;
}

/**
 * The proxy takes ids of 200 characters from clients and adds to them; peers accept engine request
 * ids of 512 bytes. A comma separates ids in heartbeat notifications.
 */
const REQUEST_ID = /^[\x21-\x2b\x2d-\x7e]{1,400}$/;

/**
 * Submits a request to the engine. As in vLLM, its id contains the client's `X-Request-Id`, so that
 * the two requests of a pair can be matched, and a unique suffix. The returned function sends its
 * tokens.
 * @throws The errors of `Engine.submit`; `KV_REQUEST_INVALID` for the body and the headers.
 */
export function startGeneration(
  route: keyof typeof GENERATION_ROUTES,
  given: unknown,
  instance: ServedInstance,
  { request: { headers }, response }: Pick<Turn, "request" | "response">,
  { uuid, maxUnreadBytes, exposeErrors }: GenerationOptions,
): () => Promise<void> {
  const { body, prefix, promptTokens, maxTokens, shape } = GENERATION_ROUTES[route](
    given,
    instance,
  );
  const { tokenizer } = instance;
  if (!instance.ready()) {
    throw new KvError("KV_ENGINE_FAILED", "the instance is shutting down", {
      details: { httpStatus: 503 },
    });
  }
  const model = checkModel(body.model ?? undefined, instance);
  const clientId = headers["x-request-id"];
  if (clientId !== undefined && (typeof clientId !== "string" || !REQUEST_ID.test(clientId))) {
    throw httpError(
      400,
      "X-Request-Id must be 1 to 400 printable ASCII characters without spaces and commas",
      "X-Request-Id",
    );
  }
  const id = `${prefix}-${clientId ?? uuid().replaceAll("-", "")}`;
  const requestId = `${id}-0-${uuid().slice(0, 8)}`;
  const zeroBlock = body.demo_zero_block ?? undefined;
  if (zeroBlock !== undefined && !instance.debug) {
    const param = "demo_zero_block";
    throw httpError(400, "demo_zero_block needs an instance started with debug", param);
  }
  const format = new ResponseFormat({ body, tokenizer, shape, promptTokens, id, model });
  let stream: EventStream | undefined;
  // The stream opens with the first token: until then an error gets a status code of its own.
  const openStream = () => {
    stream ??= new EventStream(response, id, maxUnreadBytes);
    return stream;
  };
  const handle = engineFor(headers, instance).submit({
    requestId,
    promptTokens,
    maxTokens,
    ignoreEos: body.ignore_eos ?? false,
    stopTokenIds: body.stop_token_ids ?? [],
    sampling: {
      temperature: body.temperature ?? 1,
      topP: body.top_p ?? 1,
      topK: body.top_k ?? 0,
      seed: body.seed ?? undefined,
    },
    kvTransferParams: body.kv_transfer_params ?? undefined,
    traceparent:
      readTraceparent(headers["traceparent"]) ?? peerTraceparent(body.kv_transfer_params),
    zeroBlock,
    onToken(token) {
      const text = format.text.push(token);
      if (body.stream !== true) return;
      const isFirst = stream === undefined;
      openStream().send(format.chunk(token, text, isFirst));
    },
  });
  abortOnDisconnect(response, handle);
  return async () => {
    try {
      const result = await handle.done;
      if (body.stream !== true) {
        response.setHeader("x-request-id", id);
        return sendJson(response, 200, format.whole(result));
      }
      openStream().send(format.finalChunk(result));
      if (body.stream_options?.include_usage === true) openStream().send(format.usageChunk(result));
      openStream().end();
    } catch (error) {
      if (stream === undefined) throw error;
      const failure = KvError.from(error, "KV_INTERNAL", "the instance failed");
      // The error is the last event of a response that failed after it began.
      stream.send(errorBody(failure, exposeErrors));
      stream.end();
    }
  };
}

/**
 * That of `X-data-parallel-rank`, as in vLLM, else the one with the fewest requests.
 * @throws `KV_REQUEST_INVALID` for a rank that is not there.
 */
function engineFor(headers: IncomingHttpHeaders, { engines }: ServedInstance): Engine {
  const given = headers["x-data-parallel-rank"];
  const named = engines[typeof given === "string" && /^\d{1,4}$/.test(given) ? Number(given) : -1];
  if (named !== undefined) return named;
  if (given !== undefined) {
    throw httpError(
      400,
      `X-data-parallel-rank is ${JSON.stringify(given).slice(0, 100)}; this instance has ranks 0 to ${engines.length - 1}`,
      "X-data-parallel-rank",
    );
  }
  const requestsOf = (engine: Engine) => {
    const { waiting, remote, running } = engine.requestCounts();
    return waiting + remote + running;
  };
  return engines.reduce((least, engine) =>
    requestsOf(engine) < requestsOf(least) ? engine : least,
  );
}

function checkModel(name: string | undefined, { modelNames }: ServedInstance): string {
  const [announced] = modelNames;
  if (name === undefined || modelNames.includes(name)) return name ?? announced;
  throw httpError(
    404,
    `the model "${name.slice(0, 200)}" is not served here; "${announced}" is`,
    "model",
  );
}

function abortOnDisconnect(response: ServerResponse, handle: EngineHandle): void {
  response.once("close", () => {
    if (!response.writableFinished) handle.abort("the client disconnected");
  });
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

  #write(text: string): void {
    if (this.#response.destroyed) return;
    this.#response.write(`data: ${text}\n\n`);
    // The client does not read. The close of the response aborts the request.
    if (this.#response.writableLength > this.#maxUnreadBytes) this.#response.destroy();
  }
}
