import {
  type ConnectorRequest,
  type FinishReason,
  KvError,
  type KvTransferParams,
  type Span,
  type Tracer,
} from "@kv/interface";
import { type BlockHash, blockHashes } from "./cache/block-pool.js";
import type { Candidates, EngineModelConfig } from "./engine-model.js";

export interface EngineRequest {
  readonly requestId: string;
  readonly promptTokens: readonly number[];
  readonly maxTokens: number;
  readonly ignoreEos?: boolean | undefined;
  readonly stopTokenIds?: readonly number[] | undefined;
  readonly sampling?: SamplingOptions | undefined;
  readonly kvTransferParams?: KvTransferParams | undefined;
  readonly traceparent?: string | undefined;
  /** A test: the n-th of the received blocks of its prompt is zeroed before it is used. */
  readonly zeroBlock?: number | undefined;
  onToken?(token: number): void;
}

export interface EngineResult {
  readonly tokens: readonly number[];
  readonly finishReason: "stop" | "length";
  readonly kvTransferParams: KvTransferParams | undefined;
  readonly cachedTokens: number;
  readonly remoteTokens: number;
}

export interface EngineHandle {
  readonly requestId: string;
  /** Rejects with a `KvError`: that of an abort, of the connector or of the engine. */
  readonly done: Promise<EngineResult>;
  abort(reason?: string): void;
}

/**
 * `waiting`: for blocks or a place; `remote`: a peer fills its blocks; `running`: computes;
 * `ended`: a peer may still read or write its blocks.
 */
export type RequestState = "waiting" | "remote" | "running" | "ended";

export class RequestRecord {
  readonly request: EngineRequest;
  readonly connectorRequest: ConnectorRequest;
  readonly hashes: readonly BlockHash[];
  readonly sampler: Sampler;
  readonly done: Promise<EngineResult>;
  readonly span: Span | undefined;
  readonly queueSpan: Span | undefined;
  generateSpan: Span | undefined;
  readonly output: number[] = [];
  state: RequestState = "waiting";
  /** The blocks of the prompt first; the rest is room for the output. */
  blockIds: number[] = [];
  cachedBlocks = 0;
  /** While a member of the P2P tier sends its blocks. */
  fetch: AbortController | undefined;
  fetchedTokens = 0;
  remoteTokens = 0;
  /** Tokens, of prompt and output, whose KV is in the pool. */
  numComputedTokens = 0;
  modelHasPast = false;
  /** A test damaged its blocks, or no P compared their KV with the prompt. */
  uncacheable = false;
  submittedMs = 0;
  startedMs: number | undefined;
  receivedMs: number | undefined;
  admittedMs = 0;
  forwardMs = 0;
  /** To the workers. */
  announced = false;
  inBatch = false;
  blocksFailed = false;
  ending: { readonly reason: FinishReason; readonly error: KvError | undefined } | undefined;
  #resolve: (result: EngineResult) => void = () => {};
  #reject: (error: KvError) => void = () => {};

  constructor(
    request: EngineRequest,
    options: {
      blockSize: number;
      uniform: () => number;
      prefixCaching: boolean;
      tracer?: Tracer | undefined;
    },
  ) {
    const { requestId, promptTokens, kvTransferParams, sampling = { temperature: 0 } } = request;
    const numPromptTokens = promptTokens.length;
    this.request = request;
    this.span = options.tracer?.start("kv_engine.request", {
      kind: "server",
      parent: request.traceparent,
      attributes: { "kv.request_id": requestId, "kv.prompt_tokens": numPromptTokens },
    });
    const traceparent = this.span?.traceparent ?? request.traceparent;
    this.queueSpan = this.span && options.tracer?.start("kv_engine.queue", { parent: traceparent });
    this.connectorRequest = {
      requestId,
      numPromptTokens,
      promptTokenIds: promptTokens,
      kvTransferParams,
      traceparent,
      samplingKey: samplingKey(sampling),
    };
    this.hashes = options.prefixCaching ? blockHashes(promptTokens, options.blockSize) : [];
    this.sampler = new Sampler(sampling, options.uniform);
    this.done = new Promise((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
    // Nobody reads the outcome of a client that has disconnected.
    this.done.catch(() => {});
  }

  get isPrefill(): boolean {
    return this.numComputedTokens < this.request.promptTokens.length - 1;
  }

  get sequence(): number[] {
    return [...this.request.promptTokens, ...this.output];
  }

  end(reason: FinishReason, error?: KvError): void {
    this.ending ??= { reason, error };
    this.fetch?.abort(error);
  }

  resolve(result: EngineResult): void {
    this.generateSpan?.end();
    this.span?.set({
      "kv.output_tokens": result.tokens.length,
      "kv.remote_tokens": result.remoteTokens,
    });
    this.span?.end();
    this.#resolve(result);
  }

  reject(error: KvError): void {
    this.queueSpan?.end(error);
    this.generateSpan?.end(error);
    this.span?.end(error);
    this.#reject(error);
  }

  stopReason(eosTokenIds: readonly number[]): "stopped" | "length" | undefined {
    const { stopTokenIds, ignoreEos, maxTokens } = this.request;
    const last = this.output.at(-1);
    if (last === undefined) return undefined;
    if (stopTokenIds?.includes(last) === true) return "stopped";
    if (ignoreEos !== true && eosTokenIds.includes(last)) return "stopped";
    return this.output.length >= maxTokens ? "length" : undefined;
  }
}

export function blocksFor(tokens: number, blockSize: number): number {
  return Math.ceil(tokens / blockSize);
}

/** The KV of the last token is never computed. */
export function tokensToHold(promptTokens: number, maxTokens: number): number {
  return promptTokens + maxTokens - 1;
}

export interface EngineLimits extends Pick<EngineModelConfig, "vocabSize" | "maxModelLen"> {
  readonly blockSize: number;
  readonly capacity: number;
}

/**
 * Refuses a request that can never run.
 * @throws `KV_REQUEST_INVALID`; `KV_OUT_OF_BLOCKS` for one that is larger than the whole cache.
 */
export function checkRequest(request: EngineRequest, limits: EngineLimits): void {
  const { requestId, promptTokens, maxTokens } = request;
  const { vocabSize, maxModelLen, blockSize, capacity } = limits;
  const refuse = (message: string): never => {
    throw new KvError("KV_REQUEST_INVALID", `request ${requestId}: ${message}`);
  };
  if (promptTokens.length === 0) refuse("the prompt is empty");
  if (!Number.isSafeInteger(maxTokens) || maxTokens < 1)
    refuse(`max_tokens is ${maxTokens}, not 1 or more`);
  const bad = promptTokens.find(
    (token) => !Number.isInteger(token) || token < 0 || token >= vocabSize,
  );
  if (bad !== undefined) refuse(`token ${bad} is not one of 0 to ${vocabSize - 1}`);
  const length = promptTokens.length;
  // A P has a limit of one token, which its client has not set: what is wrong with the prompt alone
  // does not name it.
  if (length >= maxModelLen)
    refuse(
      `${length} prompt tokens leave no room for an answer in the ${maxModelLen} of max_model_len`,
    );
  if (length + maxTokens > maxModelLen) {
    refuse(
      `${length} prompt tokens and max_tokens ${maxTokens} are more than the ${maxModelLen} of max_model_len`,
    );
  }
  const needed = blocksFor(tokensToHold(length, maxTokens), blockSize);
  if (needed > capacity) {
    throw new KvError(
      "KV_OUT_OF_BLOCKS",
      `request ${requestId} needs ${needed} blocks, and the instance has ${capacity}`,
      {
        hint: "start the instance with more blocks (--num-blocks), or ask for fewer tokens",
        details: { needed, capacity },
      },
    );
  }
}

/** Temperature 0 is greedy; the other options have no effect then. */
interface SamplingOptions {
  readonly temperature: number;
  readonly topP?: number | undefined;
  /** Sample from this number of tokens; 0 for no limit (the default). */
  readonly topK?: number | undefined;
  readonly seed?: number | undefined;
}

const MAX_CANDIDATES = 100;

/** Two samplers with the same key choose a first token alike. */
function samplingKey({ temperature, topP = 1, topK = 0, seed }: SamplingOptions): string {
  return temperature === 0 ? "greedy" : JSON.stringify([temperature, topP, topK, seed ?? null]);
}

/** Of one request. With the same options and seed it chooses the same tokens. */
class Sampler {
  /** How many the model is asked for. */
  readonly candidates: number;
  readonly #temperature: number;
  readonly #topP: number;
  readonly #random: () => number;

  constructor({ temperature, topP = 1, topK = 0, seed }: SamplingOptions, next: () => number) {
    this.#temperature = temperature;
    this.#topP = topP;
    this.#random = seed === undefined ? next : seededUniform(seed);
    const most = topK > 0 ? Math.min(topK, MAX_CANDIDATES) : MAX_CANDIDATES;
    this.candidates = temperature === 0 ? 1 : most;
  }

  choose({ topTokens, topLogprobs }: Candidates): number {
    if (this.#temperature === 0) return topTokens[0] ?? 0;
    const best = topLogprobs[0] ?? 0;
    const weights = Array.from(topLogprobs, (logprob) =>
      Math.exp((logprob - best) / this.#temperature),
    );
    // The smallest set of tokens whose probability reaches topP; at least one token.
    const bound = this.#topP * weights.reduce((sum, weight) => sum + weight, 0);
    let kept = 0;
    let reached = 0;
    while (kept < weights.length && (kept === 0 || reached < bound))
      reached += weights[kept++] ?? 0;
    let left = this.#random() * reached;
    for (let i = 0; i < kept; i++) {
      left -= weights[i] ?? 0;
      if (left < 0) return topTokens[i] ?? 0;
    }
    return topTokens[kept - 1] ?? 0;
  }

  /** A sampler with the same options has chosen the next token elsewhere. */
  skip(): void {
    if (this.#temperature > 0) this.#random();
  }
}

function seededUniform(seed: number): () => number {
  let counter = seed | 0;
  return () => {
    counter = (counter + 0x9e3779b9) | 0;
    let mixed = Math.imul(counter ^ (counter >>> 16), 0x21f0aaad);
    mixed = Math.imul(mixed ^ (mixed >>> 15), 0x735a2d97);
    return ((mixed ^ (mixed >>> 15)) >>> 0) / 2 ** 32;
  };
}
