import type { IncomingHttpHeaders, ServerResponse } from "node:http";
import { KvError } from "@kv/interface";
import type { Engine } from "../engine/engine.js";
import type { EngineHandle, EngineRequest, EngineResult, EngineToken } from "../engine/request.js";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";
import { httpError } from "./error-answer.js";
import type { ChatBody, CompletionBody } from "./generation-body.js";

/** One request under way: what an answer of either endpoint is made of. */
export interface Generation {
  /** As the client sees it, such as "cmpl-…". */
  readonly id: string;
  readonly model: string;
  readonly createdSeconds: number;
  readonly promptTokens: readonly number[];
  readonly handle: EngineHandle;
}

/** Request ids go into notifications, where a comma parts them. */
const REQUEST_ID = /^[\x21-\x2b\x2d-\x7e]{1,200}$/;

export interface BeginOptions {
  readonly instance: ServedInstance;
  readonly headers: IncomingHttpHeaders;
  readonly prefix: "cmpl" | "chatcmpl";
  readonly uuid: () => string;
  readonly promptTokens: readonly number[];
  readonly maxTokens: number;
  readonly topLogprobs: number;
  readonly onToken: (token: EngineToken) => void;
}

/**
 * Hands a request to the engine. The client's `X-Request-Id` becomes part of the id, as in vLLM, so that both legs of a request can be told
 * to be one; a suffix keeps the engine's id unique when it is sent again. Errors: those of `Engine.submit`, `KV_REQUEST_INVALID`.
 */
export function beginGeneration(body: CompletionBody | ChatBody, options: BeginOptions): Generation {
  const { instance, headers, prefix, uuid, promptTokens, maxTokens, topLogprobs, onToken } = options;
  const model = checkModel(body.model ?? undefined, instance);
  const given = headers["x-request-id"];
  if (given !== undefined && (typeof given !== "string" || !REQUEST_ID.test(given))) {
    throw httpError(
      400,
      "X-Request-Id must be 1 to 200 printable ASCII characters, no blank and no comma",
      "X-Request-Id",
    );
  }
  const id = `${prefix}-${given ?? uuid().replaceAll("-", "")}`;
  const requestId = `${id}-0-${uuid().slice(0, 8)}`;
  const zeroBlock = body.kv_demo_zero_block ?? undefined;
  if (zeroBlock !== undefined) {
    if (!instance.debug)
      throw httpError(400, "kv_demo_zero_block needs an instance started with debug", "kv_demo_zero_block");
    instance.zeroBlockOf(requestId, zeroBlock);
  }
  const request: EngineRequest = {
    requestId,
    promptTokens,
    maxTokens,
    ignoreEos: body.ignore_eos ?? false,
    stopTokenIds: body.stop_token_ids ?? [],
    topLogprobs,
    sampling: {
      temperature: body.temperature ?? 1,
      topP: body.top_p ?? 1,
      topK: body.top_k ?? 0,
      ...(body.seed == null ? {} : { seed: body.seed }),
    },
    ...(body.kv_transfer_params == null ? {} : { kvTransferParams: body.kv_transfer_params }),
    onToken,
  };
  const handle = instance.engine.submit(request);
  return { id, model, createdSeconds: Math.floor(Date.now() / 1000), promptTokens, handle };
}

function checkModel(given: string | undefined, { modelNames }: ServedInstance): string {
  const [shown = "model"] = modelNames;
  if (given === undefined || modelNames.includes(given)) return given ?? shown;
  throw httpError(404, `the model "${given}" is not served here; it is "${shown}"`, "model");
}

/** Aborts the request when the client goes away before its answer is complete. */
export function abortWhenGone(response: ServerResponse, handle: EngineHandle): void {
  response.once("close", () => {
    if (!response.writableFinished) handle.abort("the client went away");
  });
}

export function usageOf({ promptTokens }: Generation, completionTokens: number): Record<string, unknown> {
  return {
    prompt_tokens: promptTokens.length,
    total_tokens: promptTokens.length + completionTokens,
    completion_tokens: completionTokens,
    prompt_tokens_details: null,
  };
}

/** `kv_transfer_params` of the answer, where vLLM puts them. */
export function transferParamsOf({
  kvTransferParams,
  cachedTokens,
}: EngineResult): Record<string, unknown> | null {
  return kvTransferParams === undefined
    ? null
    : { ...kvTransferParams, remote_prefill_cached_tokens: cachedTokens };
}

export function asKvError(error: unknown): KvError {
  return KvError.from(error, "KV_INTERNAL", "the instance failed");
}

/** What the HTTP surface needs of the instance behind it. */
export interface ServedInstance {
  readonly engine: Pick<Engine, "submit" | "outstanding">;
  readonly tokenizer: Tokenizer;
  /** Names that a client may give as `model`; the first is shown. */
  readonly modelNames: readonly string[];
  readonly maxModelLen: number;
  readonly maxOutputTokens: number;
  /** Takes `kv_demo_zero_block`. */
  readonly debug: boolean;
  /** Called with the engine's request id before it is submitted, when the body asks to damage a block. */
  zeroBlockOf(requestId: string, block: number): void;
  /** False while it starts or drains. */
  ready(): boolean;
  status(): object;
  /** Counters and histograms in Prometheus' text format. */
  metrics(): string;
  /** KV sent and received lately, with digests. */
  kvTransfers(): object;
}
