import { KvError } from "@kv/interface";
import { wireLengthBytes } from "./wire-order.js";

export interface ForwardRequest {
  sequenceId: string;
  /** The tokens to run, at least one. */
  tokens: Int32Array;
  /** Position of the first of them, which is the number of tokens before it. 0 starts the sequence afresh. */
  position: number;
  /**
   * KV of the `tokens` tokens before `position`, in wire order: it replaces what the worker held of the sequence.
   * The buffer is transferred, so it is detached afterwards. Left out: the worker goes on with what it holds.
   */
  past?: { tokens: number; kv: ArrayBuffer };
  /** How many of the most likely next tokens to return, 1 to 100; default 1. */
  topLogprobs?: number;
  /** Whether to return the KV of the new tokens; default true. */
  returnKv?: boolean;
}

export interface RequestLimits {
  layers: number;
  kvHeads: number;
  headDim: number;
  vocabSize: number;
  maxModelLen: number;
}

const mostLogprobs = 100;

/** @throws KvError KV_REQUEST_INVALID naming the value and its limit. */
export function checkForwardRequest(request: ForwardRequest, limits: RequestLimits): void {
  const { sequenceId, tokens, position, past, topLogprobs = 1 } = request;
  const refuse = (what: string): never => {
    throw new KvError("KV_REQUEST_INVALID", `sequence ${sequenceId}: ${what}`);
  };
  if (tokens.length === 0) refuse("there are no tokens to run");
  for (const token of tokens) {
    if (token < 0 || token >= limits.vocabSize) {
      refuse(`token id ${token} is outside the vocabulary of ${limits.vocabSize}`);
    }
  }
  if (!Number.isInteger(position) || position < 0) refuse(`position ${position} is no token count`);
  const end = position + tokens.length;
  if (end > limits.maxModelLen) {
    refuse(`${end} tokens are more than the model's longest sequence of ${limits.maxModelLen}`);
  }
  const most = Math.min(mostLogprobs, limits.vocabSize);
  if (!Number.isInteger(topLogprobs) || topLogprobs < 1 || topLogprobs > most) {
    refuse(`topLogprobs ${topLogprobs} is not between 1 and ${most}`);
  }
  if (past === undefined) return;
  if (past.tokens !== position) refuse(`its past has ${past.tokens} tokens, its position is ${position}`);
  const expected = wireLengthBytes(limits, past.tokens);
  if (past.kv.byteLength !== expected) {
    refuse(`its past has ${past.kv.byteLength} bytes, ${past.tokens} tokens have ${expected}`);
  }
}
