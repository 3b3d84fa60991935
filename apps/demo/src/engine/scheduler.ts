import { METRICS } from "@kv/connector";
import {
  type Ambient,
  CACHE_HIT_SOURCES,
  type CacheHitSource,
  type FailedReceive,
  KvError,
  type MatchedTokens,
  type SchedulerConnector,
  type WorkerOutput,
} from "@kv/interface";
import { type BlockPool, blockHashes } from "./cache/block-pool.js";
import { blocksFor, type RequestRecord, type RequestState, tokensToHold } from "./request.js";

/** Hooks with which the demo compares sent with received KV, and damages KV on purpose. */
export interface EngineHooks {
  /** The request is computed; a peer may read its blocks as soon as this resolves. */
  beforeSend?(record: RequestRecord): Promise<void>;
  /** The peer has read the blocks or no longer wants them; they are freed next. */
  afterSend?(requestId: string, blockIds: readonly number[]): void;
  /**
   * The KV of the first `tokens` tokens has arrived. `damaged: true` keeps it out of the prefix
   * cache.
   */
  afterReceive?(record: RequestRecord, tokens: number): Promise<{ damaged: boolean }>;
  /** Of a request with KV of a peer, `sinceMs` after that KV was taken over. */
  afterFirstToken?(requestId: string, sinceMs: number): void;
}

export interface SchedulerOptions {
  readonly blocks: BlockPool;
  readonly blockSize: number;
  readonly connector: SchedulerConnector | undefined;
  readonly hooks: EngineHooks;
  readonly maxNumSeqs: number;
  readonly ambient: Ambient;
  readonly vocabSize: number;
  emit(record: RequestRecord, token: number): void;
}

const NO_TOKENS: MatchedTokens = { tokens: 0, async: false };

export interface Chunk {
  readonly record: RequestRecord;
  readonly numTokens: number;
}

export class Scheduler {
  readonly #options: SchedulerOptions;
  readonly #requests = new Map<string, RequestRecord>();
  /** Blocks of ended requests that a peer may still read or write. */
  readonly #keptBlocks = new Map<string, readonly number[]>();

  constructor(options: SchedulerOptions) {
    this.#options = options;
    for (const source of CACHE_HIT_SOURCES) this.#countCached(source, 0);
  }

  get requests(): RequestRecord[] {
    return [...this.#requests.values()];
  }

  get keptRequests(): number {
    return this.#keptBlocks.size;
  }

  get isIdle(): boolean {
    return this.#requests.size === 0 && this.#keptBlocks.size === 0;
  }

  has(requestId: string): boolean {
    return this.isAlive(requestId) || this.#keptBlocks.has(requestId);
  }

  isAlive(requestId: string): boolean {
    return this.#requests.has(requestId);
  }

  abortAll(why: string): void {
    for (const record of this.requests) {
      const message = `request ${record.request.requestId} was aborted: ${why}`;
      const details = { httpStatus: 503 };
      record.end("aborted", new KvError("KV_REQUEST_ABORTED", message, { details }));
    }
  }

  inState(state: RequestState): RequestRecord[] {
    return this.requests.filter((record) => record.state === state);
  }

  add(record: RequestRecord): void {
    record.submittedMs = this.#options.ambient.clock.now();
    this.#requests.set(record.request.requestId, record);
    this.#options.connector?.requestQueued?.(record.connectorRequest);
  }

  /** In order of arrival. One that does not fit holds back those behind it. */
  admitWaiting(): void {
    const { maxNumSeqs, ambient } = this.#options;
    let room = maxNumSeqs - this.inState("running").length - this.inState("remote").length;
    for (const record of this.inState("waiting")) {
      if (room-- <= 0) return;
      if (record.ending !== undefined || record.fetch !== undefined) continue;
      try {
        if (!this.#admit(record)) return;
        record.admittedMs = ambient.clock.now();
        record.queueSpan?.end();
      } catch (error) {
        // The connector refused the request, so no peer will write into its blocks.
        if (record.state === "remote") record.state = "running";
        const message = `request ${record.request.requestId} was not admitted`;
        record.end("error", KvError.from(error, "KV_ENGINE_FAILED", message));
      }
    }
  }

  /**
   * Marks the requests of the next batch: all that generate output, with one token each, then as
   * much of one prompt as `maxTokens` leaves room for.
   */
  nextBatch(maxTokens = Number.POSITIVE_INFINITY): Chunk[] {
    const ready = this.inState("running").filter(
      ({ ending, inBatch }) => ending === undefined && !inBatch,
    );
    const chunks = ready
      .filter(({ isPrefill }) => !isPrefill)
      .slice(0, maxTokens)
      .map((record): Chunk => ({ record, numTokens: 1 }));
    const prefill = ready.find(({ isPrefill }) => isPrefill);
    const room = maxTokens - chunks.length;
    if (prefill !== undefined && room > 0) {
      const left = prefill.request.promptTokens.length - prefill.numComputedTokens;
      chunks.push({ record: prefill, numTokens: Math.min(left, room) });
    }
    for (const { record } of chunks) record.inBatch = true;
    return chunks;
  }

  /**
   * Gives a request the blocks of its prompt and all of its output. Cached blocks are reused,
   * except for the last prompt token, whose logits are needed. Returns false, with nothing taken,
   * when there is no room now.
   * @throws The errors of `matchedTokens`.
   */
  #admit(record: RequestRecord): boolean {
    const { blocks, blockSize, connector } = this.#options;
    const { promptTokens, maxTokens } = record.request;
    const numPromptTokens = promptTokens.length;
    const cached = blocks.lookup(
      record.hashes.slice(0, Math.floor((numPromptTokens - 1) / blockSize)),
    );
    try {
      const numComputedTokens = cached.length * blockSize;
      const matched =
        connector?.matchedTokens(record.connectorRequest, numComputedTokens) ?? NO_TOKENS;
      if (matched.wait === true) {
        blocks.release(cached);
        return false;
      }
      const covered = numComputedTokens + matched.tokens;
      if (matched.tokens < 0 || covered > numPromptTokens) {
        throw new KvError(
          "KV_REQUEST_INVALID",
          `the connector matched ${matched.tokens} tokens beyond ${numComputedTokens} of a prompt of ${numPromptTokens}`,
          { details: { remoteTokens: matched.tokens, numComputedTokens, numPromptTokens } },
        );
      }
      if (matched.tokens > 0 && !matched.async) {
        throw new KvError(
          "KV_ENGINE_FAILED",
          `connector ${connector?.name} loads during the forward pass; this engine loads only before it`,
        );
      }
      const total = blocksFor(tokensToHold(numPromptTokens, maxTokens), blockSize);
      const fresh = blocks.allocate(total - cached.length);
      record.blockIds = [...cached, ...fresh];
      record.cachedBlocks = cached.length;
      record.numComputedTokens = numComputedTokens;
      record.remoteTokens = matched.tokens;
      record.state = matched.tokens > 0 ? "remote" : "running";
      // As in vLLM, at admission.
      const fetchedTokens = Math.min(record.fetchedTokens, numComputedTokens);
      this.#countCached("device", numComputedTokens - fetchedTokens);
      this.#countCached("p2p", fetchedTokens);
      if (matched.tokens > 0) {
        const source =
          connector?.cacheHitSource?.(record.connectorRequest) ?? "external_unspecified";
        this.#countCached(source, matched.tokens);
      }
      // The connector gets the blocks of the prompt only, not the room for the output.
      const shared = blocksFor(matched.tokens > 0 ? covered : numPromptTokens, blockSize);
      connector?.afterAllocation(
        record.connectorRequest,
        [record.blockIds.slice(0, shared)],
        matched.tokens,
      );
      return true;
    } catch (error) {
      if (record.state === "waiting") blocks.release(cached);
      if (KvError.is(error, "KV_OUT_OF_BLOCKS")) return false;
      throw error;
    }
  }

  async finishEnded(): Promise<string[]> {
    const { log } = this.#options.ambient;
    const ended: string[] = [];
    for (const record of this.requests) {
      // A batch or a fetch still writes into its blocks.
      if (record.ending === undefined || record.inBatch || record.fetch !== undefined) continue;
      const { requestId } = record.request;
      try {
        await this.#finish(record, record.ending);
        ended.push(requestId);
      } catch (error) {
        log.error("request-conclusion-failed", { requestId, error: String(error) });
        // A peer may still use the blocks: they are lost rather than given to another request.
        if (this.#requests.delete(requestId)) this.#keptBlocks.set(requestId, record.blockIds);
        record.reject(
          KvError.from(error, "KV_ENGINE_FAILED", `request ${requestId} could not be ended`),
        );
      }
    }
    return ended;
  }

  async #finish(
    record: RequestRecord,
    { reason, error }: NonNullable<RequestRecord["ending"]>,
  ): Promise<void> {
    const { connector, blocks, blockSize, hooks } = this.#options;
    const { connectorRequest, state, blockIds, numComputedTokens } = record;
    const { requestId } = record.request;
    const succeeded = reason === "stopped" || reason === "length";
    if (succeeded) {
      await hooks.beforeSend?.(record);
      this.#cacheOutput(record);
      this.#countPrompt(record);
    }
    const computed =
      state === "waiting" ? [] : blockIds.slice(0, blocksFor(numComputedTokens, blockSize));
    const outputTokenIds = [...record.output];
    const held = { ...connectorRequest, numComputedTokens, outputTokenIds };
    const finished = connector?.requestFinished(held, [computed], reason) ?? { keepBlocks: false };
    this.#requests.delete(requestId);
    record.state = "ended";
    if (!finished.keepBlocks) blocks.release(blockIds);
    else if (state === "remote" && record.announced) {
      // A peer may write into any of the blocks until the workers report that it no longer does.
      this.#keptBlocks.set(requestId, blockIds);
    } else {
      this.#keptBlocks.set(requestId, computed);
      blocks.release(blockIds.slice(computed.length));
    }
    if (error !== undefined) record.reject(error);
    else {
      record.resolve({
        tokens: record.output,
        finishReason: reason === "stopped" ? "stop" : "length",
        kvTransferParams: finished.kvTransferParams,
        cachedTokens: record.cachedBlocks * blockSize,
        remoteTokens: record.remoteTokens,
      });
    }
  }

  async applyWorkerOutput(output: WorkerOutput): Promise<boolean> {
    const { connector, hooks } = this.#options;
    connector?.applyWorkerOutput(output);
    const invalid = new Set(output.failedBlockIds);
    for (const record of this.inState("remote"))
      record.blocksFailed ||= record.blockIds.some((id) => invalid.has(id));
    for (const requestId of output.unverifiedReceiving ?? []) {
      const record = this.#requests.get(requestId);
      if (record !== undefined) record.uncacheable = true;
    }
    let changed = false;
    const failures = new Map(output.failedReceiving.map((failed) => [failed.requestId, failed]));
    for (const requestId of output.finishedReceiving) {
      const record = this.#requests.get(requestId);
      if (record?.state === "remote") {
        await this.#finishReceiving(record, failures.get(requestId));
        changed = true;
      } else changed = this.#freeKept(requestId) || changed;
    }
    for (const requestId of output.finishedSending) {
      hooks.afterSend?.(requestId, this.#keptBlocks.get(requestId) ?? []);
      changed = this.#freeKept(requestId) || changed;
    }
    return changed;
  }

  async #finishReceiving(record: RequestRecord, failed: FailedReceive | undefined): Promise<void> {
    if (failed !== undefined || record.blocksFailed)
      return this.#recoverFailedReceive(record, failed);
    try {
      await this.#takeOverReceived(record);
    } catch (error) {
      record.state = "running";
      const message = `the received KV of request ${record.request.requestId} could not be used`;
      record.end("error", KvError.from(error, "KV_ENGINE_FAILED", message));
    }
  }

  async #takeOverReceived(record: RequestRecord): Promise<void> {
    const { blockSize, hooks } = this.#options;
    const { request, cachedBlocks } = record;
    const covered = cachedBlocks * blockSize + record.remoteTokens;
    const received = await hooks.afterReceive?.(record, covered);
    record.uncacheable ||= received?.damaged === true;
    this.cachePrompt(record, covered);
    // The logits of the last prompt token give the first output token.
    record.numComputedTokens = Math.min(covered, request.promptTokens.length - 1);
    record.receivedMs = this.#options.ambient.clock.now();
    record.state = "running";
    if (covered === request.promptTokens.length) this.#takeFirstToken(record);
  }

  /** Emits the token that P has sampled: the last token of the prompt is not computed again. */
  #takeFirstToken(record: RequestRecord): void {
    const { connector, emit, vocabSize } = this.#options;
    const { connectorRequest, request } = record;
    const token = connector?.firstToken?.(connectorRequest);
    if (token === undefined || record.ending !== undefined) return;
    if (token >= vocabSize) {
      throw new KvError(
        "KV_REQUEST_INVALID",
        `kv_transfer_params: first_token_ids has token ${token}, which is not one of 0 to ${vocabSize - 1}`,
        { hint: "serve the same model on both sides", details: { key: "first_token_ids" } },
      );
    }
    record.sampler.skip();
    record.numComputedTokens = request.promptTokens.length;
    record.output.push(token);
    record.span?.set({ "kv.first_token": "prefill" });
    emit(record, token);
  }

  /** By the connector's policy the request fails, or computes its prompt itself. */
  #recoverFailedReceive(record: RequestRecord, failed: FailedReceive | undefined): void {
    const { connector, ambient } = this.#options;
    const { requestId } = record.request;
    record.state = "running";
    record.remoteTokens = 0;
    const code = failed?.code ?? "KV_TRANSFER_FAILED";
    const message = failed?.message ?? `some blocks of request ${requestId} were not received`;
    const details = { requestId, failureType: failed?.failureType };
    // Blocks that a peer may still write to cannot be computed into.
    if (failed?.blocksAtRisk === true || connector?.loadFailurePolicy !== "recompute")
      record.end("error", new KvError(code, message, { details }));
    else ambient.log.warn("kv-recomputed", { requestId, code, message });
  }

  #freeKept(requestId: string): boolean {
    const { blocks, ambient } = this.#options;
    const blockIds = this.#keptBlocks.get(requestId);
    if (blockIds === undefined) {
      ambient.log.warn("unknown-request-finished", { requestId });
      return false;
    }
    this.#keptBlocks.delete(requestId);
    blocks.release(blockIds);
    return true;
  }

  cachePrompt(record: RequestRecord, tokens: number): void {
    this.#cache(record, record.hashes.slice(0, Math.floor(tokens / this.#options.blockSize)));
  }

  /** For a next turn, which begins with prompt and output. */
  #cacheOutput(record: RequestRecord): void {
    const { blockSize } = this.#options;
    const { hashes, sequence, numComputedTokens } = record;
    const tokens = sequence.slice(hashes.length * blockSize, numComputedTokens);
    this.#cache(record, [...hashes, ...blockHashes(tokens, blockSize, hashes.at(-1))]);
  }

  #countCached(source: CacheHitSource, tokens: number): void {
    this.#options.ambient.metrics.count(METRICS.promptTokensCachedBySource, tokens, { source });
  }

  #countPrompt({ request, cachedBlocks, remoteTokens }: RequestRecord): void {
    const { blockSize, ambient } = this.#options;
    const local = cachedBlocks * blockSize;
    const tokens = {
      local_compute: request.promptTokens.length - local - remoteTokens,
      local_cache_hit: local,
      external_kv_transfer: remoteTokens,
    };
    for (const [source, count] of Object.entries(tokens))
      ambient.metrics.count(METRICS.promptTokensBySource, count, { source });
  }

  #cache({ blockIds, uncacheable, sequence }: RequestRecord, hashes: readonly string[]): void {
    if (!uncacheable) this.#options.blocks.cachePrefix(blockIds, hashes, sequence);
  }
}
