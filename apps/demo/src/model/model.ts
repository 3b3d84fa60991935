import { KvError } from "@kv/interface";
import { kvBytes } from "../engine/cache/kv-layout.js";
import type { EngineModel, EngineModelConfig, ForwardInput } from "../engine/engine-model.js";
import { startModelThread } from "./model-thread.js";
import { type PrepareOptions, prepareModel, readModelFacts } from "./prepare-model.js";
import type { ForwardDone, SessionShape } from "./worker/worker-protocol.js";

export interface ModelConfig extends EngineModelConfig {
  readonly name: string;
  readonly directory: string;
  readonly kvType: SessionShape["kvType"];
}

/**
 * A decoder on its own thread. Calls run one after another, in the order in which they were made.
 */
export interface Model extends EngineModel {
  readonly config: ModelConfig;
  /**
   * One step of one sequence.
   *
   * @throws KvError KV_REQUEST_INVALID for tokens or positions out of range, a past of the wrong
   * length, or a
   *   position that does not continue the worker's KV; KV_REQUEST_ABORTED when the model is closed before the step
   *   starts; KV_ENGINE_FAILED when the step fails or the thread dies.
   */
  forward(input: ForwardInput): Promise<ForwardDone>;
  /**
   * Ends the thread after the step in progress; steps that wait are rejected. May be called again.
   */
  close(): Promise<void>;
}

export interface LoadOptions extends PrepareOptions {
  directory?: string | undefined;
  intraOpThreads?: number | undefined;
}

/**
 * @throws KvError KV_CONFIG_INVALID or KV_MODEL_UNSUPPORTED, naming the file and what is wrong with
 * it.
 */
export async function loadModel(options: LoadOptions = {}): Promise<Model> {
  const { directory, intraOpThreads = 1, ...prepare } = options;
  if (!Number.isInteger(intraOpThreads) || intraOpThreads < 1 || intraOpThreads > 1024) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `intraOpThreads ${intraOpThreads} is not between 1 and 1024`,
    );
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
  const { name, directory: home } = prepared;
  const { maxModelLen, eosTokenIds } = facts;
  const shape = { layers, kvHeads, headDim, vocabSize, maxModelLen, eosTokenIds };
  const config: ModelConfig = Object.freeze({ name, directory: home, ...shape, kvType });

  return {
    config,
    async forward(input) {
      checkForward(input, config);
      const { past, topLogprobs = 1 } = input;
      // A copy: posting a view would copy its whole buffer.
      const job = { ...input, tokens: input.tokens.slice(), topLogprobs };
      const transfer = past === undefined ? [] : [past.kv];
      const done = await thread.call((id) => ({ kind: "forward", id, job }), transfer);
      if (done === undefined)
        throw new KvError("KV_INTERNAL", "the model's thread answered a step without a result");
      return done;
    },
    async dropSequence(sequenceId) {
      try {
        await thread.call((id) => ({ kind: "drop", id, sequenceId }));
      } catch (error) {
        // A thread that has ended holds no sequences.
        if (!thread.ended()) throw error;
      }
    },
    close: () => thread.close(),
  };
}

const maxLogprobs = 100;

function checkForward(input: ForwardInput, limits: EngineModelConfig): void {
  const { sequenceId, tokens, position, past, topLogprobs = 1 } = input;
  const refuse = (message: string): never => {
    throw new KvError("KV_REQUEST_INVALID", `sequence ${sequenceId}: ${message}`);
  };
  if (tokens.length === 0) refuse("there are no tokens to run");
  for (const token of tokens) {
    if (token < 0 || token >= limits.vocabSize) {
      refuse(`token id ${token} is outside the vocabulary of ${limits.vocabSize}`);
    }
  }
  if (!Number.isInteger(position) || position < 0)
    refuse(`position ${position} is not a number of tokens`);
  const end = position + tokens.length;
  if (end > limits.maxModelLen) {
    refuse(`${end} tokens exceed the model's limit of ${limits.maxModelLen}`);
  }
  const most = Math.min(maxLogprobs, limits.vocabSize);
  if (!Number.isInteger(topLogprobs) || topLogprobs < 1 || topLogprobs > most) {
    refuse(`topLogprobs ${topLogprobs} is not between 1 and ${most}`);
  }
  if (past === undefined) return;
  if (past.tokens !== position)
    refuse(`its past has ${past.tokens} tokens, its position is ${position}`);
  const expected = kvBytes(limits, past.tokens);
  if (past.kv.byteLength !== expected) {
    refuse(`its past has ${past.kv.byteLength} bytes, ${past.tokens} tokens have ${expected}`);
  }
}
