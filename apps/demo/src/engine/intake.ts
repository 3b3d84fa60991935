import { KvError } from "@kv/interface";
import { blocksFor, tokensToHold } from "./admission.js";
import { blockHashes } from "./block-hash.js";
import type { EngineModelConfig } from "./model-port.js";
import type { EngineRequest, EngineResult, RequestRecord } from "./request.js";
import { createSampler } from "./sampling.js";

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
