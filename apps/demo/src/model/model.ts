import { KvError } from "@kv/interface";
import { startModelThread } from "./model-thread.js";
import { type PrepareOptions, prepareModel, readModelFacts } from "./prepare-model.js";
import { wireLengthBytes } from "./worker/wire-order.js";

export interface ModelConfig {
  name: string;
  /** Directory with config.json and the tokenizer's files (`loadTokenizer`). */
  directory: string;
  layers: number;
  kvHeads: number;
  headDim: number;
  vocabSize: number;
  /** Most tokens of a sequence, prompt and output together. */
  maxModelLen: number;
  eosTokenIds: readonly number[];
  /** Element type of KV in wire order. */
  dtype: "float32";
  /** Element type of the model's own cache. */
  kvType: "float32" | "float16";
}

export interface ForwardResult {
  /** The most likely next tokens, best first; the first is the greedy choice (of equal ones the lowest id). */
  topTokens: Int32Array;
  /** Their natural log-probabilities. */
  topLogprobs: Float32Array;
  /** KV of the tokens of this call, in wire order: float32 `[layer][kv_head][token][2 * head_dim]`, key then value. */
  newKv: ArrayBuffer;
  /** Computing time in the worker thread. */
  computeMs: number;
}

/** A decoder on its own thread. Calls run one after another, in the order in which they were made. */
export interface Model {
  readonly config: ModelConfig;
  /**
   * One step of one sequence.
   *
   * @throws KvError KV_REQUEST_INVALID for tokens or positions out of range, a past of the wrong length, or a
   *   position that does not continue the worker's KV; KV_REQUEST_ABORTED when the signal fires before the
   *   step starts or the model is closed; KV_ENGINE_FAILED when the step fails or the thread dies.
   */
  forward(request: ForwardRequest, options?: { signal?: AbortSignal }): Promise<ForwardResult>;
  /** Forgets the past of a sequence, after the calls made before; no error when there is none. */
  dropSequence(sequenceId: string): Promise<void>;
  /** Ends the thread after the step in progress; steps that wait are rejected. May be called again. */
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

export interface LoadOptions extends PrepareOptions {
  /** A directory with an exported decoder or a Hugging Face checkpoint; default: the built-in tiny model. */
  directory?: string | undefined;
  /** Threads of ONNX Runtime; default 1. */
  intraOpThreads?: number | undefined;
}

/** @throws KvError KV_CONFIG_INVALID or KV_MODEL_UNSUPPORTED, naming the file and what is wrong with it. */
export async function loadModel(options: LoadOptions = {}): Promise<Model> {
  const { directory, intraOpThreads = 1, ...prepare } = options;
  if (!Number.isInteger(intraOpThreads) || intraOpThreads < 1 || intraOpThreads > 1024) {
    throw new KvError("KV_CONFIG_INVALID", `intraOpThreads ${intraOpThreads} is not between 1 and 1024`);
  }
  const prepared = await prepareModel(directory, prepare);
  const facts = await readModelFacts(prepared.directory);
  const { onnxPath } = prepared;
  const thread = await startModelThread({
    onnxPath,
    intraOpThreads,
    kvHeads: facts.kvHeads,
    headDim: facts.headDim,
  });
  const vocabSize = thread.shape.vocabSize ?? facts.vocabSize;
  if (vocabSize === undefined) {
    await thread.close();
    throw new KvError(
      "KV_CONFIG_INVALID",
      `neither ${onnxPath} nor config.json has the size of the vocabulary`,
    );
  }
  const { layers, kvHeads, headDim, kvType } = thread.shape;
  const { name } = prepared;
  const { maxModelLen, eosTokenIds } = facts;
  const config: ModelConfig = Object.freeze({
    name,
    directory: prepared.directory,
    layers,
    kvHeads,
    headDim,
    vocabSize,
    maxModelLen,
    eosTokenIds,
    dtype: "float32",
    kvType,
  });

  return {
    config,
    async forward(request, { signal } = {}) {
      checkForwardRequest(request, config);
      const { sequenceId, position, past, topLogprobs = 1 } = request;
      // A copy: posting a view would copy its whole buffer.
      const tokens = request.tokens.slice();
      const job = { sequenceId, tokens, position, past, topLogprobs };
      const transfer = past === undefined ? [] : [past.kv];
      const done = await thread.call((id) => ({ kind: "forward", id, job }), { transfer, signal });
      if (done === undefined)
        throw new KvError("KV_INTERNAL", "the model's thread answered a step without a result");
      return done;
    },
    async dropSequence(sequenceId) {
      try {
        await thread.call((id) => ({ kind: "drop", id, sequenceId }), { transfer: [], signal: undefined });
      } catch (error) {
        // A thread that has ended holds no sequences.
        if (!thread.ended()) throw error;
      }
    },
    close: () => thread.close(),
    [Symbol.asyncDispose]: () => thread.close(),
  };
}

export interface ForwardRequest {
  sequenceId: string;
  /** The tokens to run, at least one. */
  tokens: Int32Array;
  /** Position of the first token, which is the number of tokens before it. 0 starts the sequence again. */
  position: number;
  /**
   * KV of the `tokens` tokens before `position`, in wire order. It replaces the KV that the worker holds of the sequence.
   * The buffer is transferred: it is detached afterwards. Default: the worker continues with its own KV.
   */
  past?: { tokens: number; kv: ArrayBuffer } | undefined;
  /** How many of the most likely next tokens to return, 1 to 100; default 1. */
  topLogprobs?: number | undefined;
}

export interface RequestLimits {
  layers: number;
  kvHeads: number;
  headDim: number;
  vocabSize: number;
  maxModelLen: number;
}

const maxLogprobs = 100;

/** @throws KvError KV_REQUEST_INVALID naming the value and its limit. */
function checkForwardRequest(request: ForwardRequest, limits: RequestLimits): void {
  const { sequenceId, tokens, position, past, topLogprobs = 1 } = request;
  const refuse = (message: string): never => {
    throw new KvError("KV_REQUEST_INVALID", `sequence ${sequenceId}: ${message}`);
  };
  if (tokens.length === 0) refuse("there are no tokens to run");
  for (const token of tokens) {
    if (token < 0 || token >= limits.vocabSize) {
      refuse(`token id ${token} is outside the vocabulary of ${limits.vocabSize}`);
    }
  }
  if (!Number.isInteger(position) || position < 0) refuse(`position ${position} is not a number of tokens`);
  const end = position + tokens.length;
  if (end > limits.maxModelLen) {
    refuse(`${end} tokens exceed the model's limit of ${limits.maxModelLen}`);
  }
  const most = Math.min(maxLogprobs, limits.vocabSize);
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
