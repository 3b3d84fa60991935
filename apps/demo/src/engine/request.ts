import { type ConnectorRequest, type FinishReason, KvError, type KvTransferParams } from "@kv/interface";
import { blocksFor, tokensToHold } from "./admission.js";
import { type BlockHash, blockHashes } from "./cache/block-pool.js";
import type { EngineModelConfig } from "./engine-model.js";
import { createSampler, type Sampler, type SamplingOptions } from "./sampling.js";

/** What a client asks of the engine. */
export interface EngineRequest {
  /** Unique among the requests alive. */
  readonly requestId: string;
  readonly promptTokens: readonly number[];
  readonly maxTokens: number;
  /** Go on after an end-of-sequence token. */
  readonly ignoreEos?: boolean;
  /** Ends the output like an end-of-sequence token does, `ignoreEos` or not. */
  readonly stopTokenIds?: readonly number[];
  /** Greedy when absent. */
  readonly sampling?: SamplingOptions;
  /** How many alternatives to report with each token, 0 to 20. */
  readonly topLogprobs?: number;
  readonly kvTransferParams?: KvTransferParams;
  /** Called with each token as it is made. */
  onToken?(token: EngineToken): void;
}

export interface EngineToken {
  readonly token: number;
  readonly logprob: number;
  /** The most likely tokens, as many as the request asks for. */
  readonly top: readonly { readonly token: number; readonly logprob: number }[];
}

/** How a request ended well. */
export interface EngineResult {
  readonly tokens: readonly EngineToken[];
  readonly finishReason: "stop" | "length";
  /** For the other side of a pair, from the connector. */
  readonly kvTransferParams: KvTransferParams | undefined;
  /** Prompt tokens whose KV was in the prefix cache, and those whose KV came from a peer. */
  readonly cachedTokens: number;
  readonly remoteTokens: number;
}

export interface EngineHandle {
  readonly requestId: string;
  /** Rejects with a `KvError`: `KV_REQUEST_ABORTED`, the connector's code when the KV did not arrive, `KV_ENGINE_FAILED`. */
  readonly done: Promise<EngineResult>;
  abort(reason?: string): void;
}

/**
 * - `waiting`: for room, a turn, or both
 * - `remote`: its blocks are being filled by a peer
 * - `running`: computes prompt or output
 * - `ended`: has an outcome; its blocks may be held yet, for a peer that reads or writes them
 */
export type RequestState = "waiting" | "remote" | "running" | "ended";

/** The engine's own record of a request. */
export interface RequestRecord {
  readonly request: EngineRequest;
  readonly connectorRequest: ConnectorRequest;
  readonly hashes: readonly BlockHash[];
  readonly sampler: Sampler;
  state: RequestState;
  /** Those for the prompt first; the rest is room for the output. */
  blockIds: number[];
  /** Blocks at the begin of `blockIds` that came from the prefix cache. */
  cachedBlocks: number;
  remoteTokens: number;
  /** Tokens, of prompt and output, whose KV is in the pool. */
  numComputedTokens: number;
  /** The model holds the first `numComputedTokens` tokens of the sequence. */
  modelHasPast: boolean;
  /** Content that must not be found by others (a test damaged it). */
  uncacheable: boolean;
  readonly output: EngineToken[];
  remoteSinceMs: number;
  /** Spent in forward passes. */
  forwardMs: number;
  /** The workers have been asked for its KV. */
  announced: boolean;
  /** A worker named one of its blocks as not filled. */
  blocksFailed: boolean;
  /** Set when the request is to end at the next chance. */
  ending: { readonly reason: FinishReason; readonly error?: KvError } | undefined;
  settle: { resolve(result: EngineResult): void; reject(error: KvError): void };
}

export interface EngineLimits {
  readonly model: EngineModelConfig;
  readonly blockSize: number;
  /** Blocks that requests can hold. */
  readonly capacity: number;
}

/**
 * Refuses what could never run. Errors: `KV_REQUEST_INVALID` naming the value and its limit; `KV_OUT_OF_BLOCKS` for a request that
 * is larger than the whole cache.
 */
export function checkRequest(request: EngineRequest, { model, blockSize, capacity }: EngineLimits): void {
  const { requestId, promptTokens, maxTokens } = request;
  const refuse = (message: string): never => {
    throw new KvError("KV_REQUEST_INVALID", `request ${requestId}: ${message}`);
  };
  if (promptTokens.length === 0) refuse("the prompt is empty");
  if (!Number.isSafeInteger(maxTokens) || maxTokens < 1) refuse(`max_tokens is ${maxTokens}, not 1 or more`);
  const bad = promptTokens.find((token) => !Number.isInteger(token) || token < 0 || token >= model.vocabSize);
  if (bad !== undefined) refuse(`token ${bad} is not one of 0 to ${model.vocabSize - 1}`);
  const length = promptTokens.length;
  if (length + maxTokens > model.maxModelLen) {
    refuse(
      `${length} prompt tokens and max_tokens ${maxTokens} are more than the model's ${model.maxModelLen}`,
    );
  }
  const needed = blocksFor(tokensToHold(length, maxTokens), blockSize);
  if (needed > capacity) {
    throw new KvError(
      "KV_OUT_OF_BLOCKS",
      `request ${requestId} needs ${needed} blocks, and there are ${capacity}`,
      {
        hint: "start the instance with more blocks (--num-blocks), or ask for fewer tokens",
        details: { needed, capacity },
      },
    );
  }
}

/** The engine's record of a new request, and the promise of its outcome. */
export function openRecord(
  request: EngineRequest,
  { blockSize, uniform, prefixCaching }: { blockSize: number; uniform: () => number; prefixCaching: boolean },
): { record: RequestRecord; done: Promise<EngineResult> } {
  const { requestId, promptTokens, kvTransferParams } = request;
  let settle: RequestRecord["settle"] = { resolve() {}, reject() {} };
  const done = new Promise<EngineResult>((resolve, reject) => {
    settle = { resolve, reject };
  });
  // A caller that has gone away reads no outcome, and that is no crash.
  done.catch(() => {});
  const record: RequestRecord = {
    request,
    connectorRequest: { requestId, numPromptTokens: promptTokens.length, kvTransferParams },
    hashes: prefixCaching ? blockHashes(promptTokens, blockSize) : [],
    sampler: createSampler(request.sampling ?? { temperature: 0 }, uniform),
    state: "waiting",
    blockIds: [],
    cachedBlocks: 0,
    remoteTokens: 0,
    numComputedTokens: 0,
    modelHasPast: false,
    uncacheable: false,
    output: [],
    remoteSinceMs: 0,
    forwardMs: 0,
    announced: false,
    blocksFailed: false,
    ending: undefined,
    settle,
  };
  return { record, done };
}
