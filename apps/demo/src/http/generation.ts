import type { IncomingHttpHeaders, ServerResponse } from "node:http";
import { readTraceparent } from "@kv/interface";
import { peerTraceparent } from "@kv/protocol";
import type { Engine } from "../engine/engine.js";
import type { EngineHandle, EngineResult, EngineToken } from "../engine/request.js";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";
import { httpError } from "./error-response.js";
import type { ChatBody, CompletionBody } from "./request-body.js";

export interface ServedInstance {
  readonly engines: readonly Pick<
    Engine,
    "submit" | "requestCounts" | "releaseRemote" | "sleepMode"
  >[];
  readonly tokenizer: Tokenizer;
  /** Names that a client may give as `model`; the first one is announced. */
  readonly modelNames: readonly string[];
  readonly maxModelLen: number;
  readonly maxOutputTokens: number;
  readonly debug: boolean;
  /**
   * Zeroes the n-th prompt block of a request when its KV has arrived. Called with the engine's
   * request id before it is submitted.
   */
  zeroBlockOf(requestId: string, block: number): void;
  ready(): boolean;
  status(): object;
  metrics(): string;
  kvTransfers(): object;
}

export interface Generation {
  /** The id that the client sees, such as "cmpl-…". */
  readonly id: string;
  readonly model: string;
  readonly createdSeconds: number;
  readonly promptTokens: readonly number[];
  readonly handle: EngineHandle;
}

/**
 * The proxy takes ids of 200 characters from clients and adds to them: a part's number, a uuid for
 * a retry, "-release". Peers accept engine request ids of 512 bytes, which have a prefix and a
 * suffix. A comma is excluded: it separates request ids in heartbeat notifications.
 */
const REQUEST_ID = /^[\x21-\x2b\x2d-\x7e]{1,400}$/;

export interface GenerationOptions {
  readonly instance: ServedInstance;
  readonly headers: IncomingHttpHeaders;
  readonly prefix: "cmpl" | "chatcmpl";
  readonly uuid: () => string;
  readonly promptTokens: readonly number[];
  readonly maxTokens: number;
  readonly topLogprobs: number | undefined;
  readonly onToken: (token: EngineToken) => void;
  readonly isStopped: () => boolean;
}

/**
 * Submits a request to the engine. As in vLLM, the request id contains the client's `X-Request-Id`,
 * so that the two requests of a pair can be matched, and a suffix that makes it unique.
 * @throws The errors of `Engine.submit`; `KV_REQUEST_INVALID` for the model, the header or
 * `demo_zero_block`.
 */
export function startGeneration(
  body: CompletionBody | ChatBody,
  options: GenerationOptions,
): Generation {
  const {
    instance,
    headers,
    prefix,
    uuid,
    promptTokens,
    maxTokens,
    topLogprobs,
    onToken,
    isStopped,
  } = options;
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
  if (zeroBlock !== undefined) {
    if (!instance.debug)
      throw httpError(
        400,
        "demo_zero_block needs an instance started with debug",
        "demo_zero_block",
      );
    instance.zeroBlockOf(requestId, zeroBlock);
  }
  const handle = engineFor(headers, instance).submit({
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
      seed: body.seed ?? undefined,
    },
    kvTransferParams: body.kv_transfer_params ?? undefined,
    traceparent: readTraceparent(headers.traceparent) ?? peerTraceparent(body.kv_transfer_params),
    onToken,
    isStopped,
  });
  return { id, model, createdSeconds: Math.floor(Date.now() / 1000), promptTokens, handle };
}

/**
 * The engine of the rank that `X-data-parallel-rank` names, as in vLLM; without the header the one
 * with the fewest requests.
 * @throws `KV_REQUEST_INVALID` for a rank that is not there.
 */
function engineFor(
  headers: IncomingHttpHeaders,
  { engines }: ServedInstance,
): ServedInstance["engines"][number] {
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
  const requests = engines.map((engine) => {
    const { waiting, remote, running } = engine.requestCounts();
    return waiting + remote + running;
  });
  return engines[requests.indexOf(Math.min(...requests))] as ServedInstance["engines"][number];
}

function checkModel(name: string | undefined, { modelNames }: ServedInstance): string {
  const [announced = "model"] = modelNames;
  if (name === undefined || modelNames.includes(name)) return name ?? announced;
  throw httpError(
    404,
    `the model "${name.slice(0, 200)}" is not served here; "${announced}" is`,
    "model",
  );
}

export function abortOnDisconnect(response: ServerResponse, handle: EngineHandle): void {
  response.once("close", () => {
    if (!response.writableFinished) handle.abort("the client disconnected");
  });
}

export function usageOf(
  { promptTokens }: Generation,
  completionTokens: number,
): Record<string, unknown> {
  return {
    prompt_tokens: promptTokens.length,
    total_tokens: promptTokens.length + completionTokens,
    completion_tokens: completionTokens,
    prompt_tokens_details: null,
  };
}

/**
 * `kv_transfer_params` of a response, as in vLLM: the number of cached tokens is P's, with those
 * that it has read back.
 */
export function transferParamsOf({
  kvTransferParams,
  cachedTokens,
  remoteTokens,
}: EngineResult): Readonly<Record<string, unknown>> | null {
  if (kvTransferParams === undefined) return null;
  if (kvTransferParams.do_remote_decode === true) return kvTransferParams;
  return { ...kvTransferParams, remote_prefill_cached_tokens: cachedTokens + remoteTokens };
}

/** The same in a stream: a member of the chunk with the finish reason, as in vLLM. */
export function transferMember(result: EngineResult): Record<string, unknown> {
  return result.kvTransferParams === undefined
    ? {}
    : { kv_transfer_params: transferParamsOf(result) };
}
