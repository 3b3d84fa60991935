import {
  type BlockIds,
  type Clock,
  type ConnectorRequest,
  type KvCacheConfig,
  KvError,
  type KvTransferParams,
  type MatchedTokens,
} from "@kv/interface";
import { exchangedBlocks } from "@kv/plan";
import {
  namesReadback,
  type PromptPrefix,
  promptContent,
  promptDigest,
  readbackParams,
  type TransferMode,
} from "@kv/protocol";
import { type PrefillBackoff, requireLastTokensLeft } from "../config/prefill-backoff.js";
import {
  addressOf,
  addressToNotify,
  type EngineAddress,
  engineKey,
  type HeartbeatRequest,
  heartbeatKey,
  heartbeatRequest,
  type RemoteReference,
  RemoteReferences,
  type RemoteRequest,
  traceMember,
} from "../requests/references.js";
import type { HeartbeatChange } from "../requests/step-metadata.js";

/** A request's P and how much of the prompt it has. */
export interface PromptSource {
  readonly remote: RemoteRequest;
  /** Prompt tokens whose KV P has or will have, if the parameters say it. */
  readonly numTokens?: number | undefined;
}

export interface BlocksToFetch {
  /** Per KV cache group, without the local prefix hit. */
  readonly localBlockIds: BlockIds;
  readonly localComputedBlocks: readonly number[];
}

/** One request to fetch. */
export interface FetchOrder extends BlocksToFetch {
  /** Tokens from the start of the prompt whose KV D will have. */
  readonly numTokens: number;
  /** On D's scheduler's clock, in ms. */
  readonly seenAtMs: number;
  /** Undefined where the engine does not know them. */
  readonly prompt: PromptPrefix | undefined;
}

/** Turns D's requests into orders for the workers, for pull or push. */
export interface DecodeOrders<Source extends PromptSource, Step extends object> {
  readonly maxReaders: number;
  /** @throws `KV_REQUEST_INVALID`. */
  read(params: KvTransferParams, numPromptTokens: number): Source;
  fetch(requestId: string, source: Source, order: FetchOrder): void;
  cancelFetch(requestId: string): boolean;
  abort(requestId: string): void;
  /** Tells P to free a request's blocks of `numTokens` tokens, none of which were fetched. */
  release(request: ConnectorRequest, remote: RemoteRequest, numTokens: number): void;
  /** Called when the last request that fetched P's blocks is done. */
  fetched?(remote: RemoteRequest): void;
  ended?(requestId: string): void;
  takeStep(): Step;
  readonly hasOrders: boolean;
  /** Counts of what is held besides the orders; zero after the last request. */
  outstanding?(): Readonly<Record<string, number>>;
  close?(): void;
}

/**
 * `queued`: the workers have no orders. `fetching`: KV arrives in the blocks. `leaving`: aborted,
 * but the blocks may still be filled. `at-risk`: failed, and a peer may still write. `ended`: kept
 * until the engine ends the request, so that it is not fetched twice.
 */
type Phase = "queued" | "fetching" | "leaving" | "at-risk" | "ended";

interface RequestState<Source> {
  phase: Phase;
  readonly source: Source | undefined;
  readonly reference: RemoteReference | undefined;
  readonly refusal: KvError | undefined;
  readonly seenAtMs: number;
  numComputedTokens: number;
  /** By group, where `matched` got it. */
  computedTokens: readonly number[] | undefined;
  isUnverified: boolean;
}

interface DecodeRequestsOptions<Source extends PromptSource> {
  readonly clock: Clock;
  readonly config: KvCacheConfig;
  readonly dcpSize: number;
  readonly mode: TransferMode;
  readonly orders: DecodeOrders<Source, object>;
  readonly rememberMs: number;
  readonly backoff?: PrefillBackoff | undefined;
  /** P computes fewer tokens itself. */
  readonly recomputeThresholdTokens: number;
}

const NOTHING: MatchedTokens = { tokens: 0, async: false };

/**
 * The scheduler side of requests that fetch KV, for pull and push: D's, and with
 * `bidirectional_kv_xfer` those of a P that reads blocks back from D. Each request has a state of
 * its own, where vLLM 0.33 changes the request's parameters.
 */
export class DecodeRequests<Source extends PromptSource> {
  readonly #options: DecodeRequestsOptions<Source>;
  readonly #orders: DecodeOrders<Source, object>;
  readonly #states = new Map<string, RequestState<Source>>();
  readonly #heartbeats = new HeartbeatSet();
  readonly #references: RemoteReferences;
  readonly #ownTokens: number;

  constructor(options: DecodeRequestsOptions<Source>) {
    const { clock, orders, rememberMs, backoff } = options;
    this.#options = options;
    this.#orders = orders;
    this.#ownTokens = backoff?.tokens ?? 0;
    this.#references = new RemoteReferences({ clock, rememberMs, maxReaders: orders.maxReaders });
  }

  queued(request: ConnectorRequest): void {
    this.#see(request);
  }

  /**
   * As `SchedulerConnector.matchedTokens`.
   * @throws `KV_REQUEST_INVALID`, `KV_PLAN_UNSUPPORTED`, `KV_REFERENCE_USED`, `KV_REFERENCES_FULL`.
   */
  matched(
    request: ConnectorRequest,
    numComputedTokens: number,
    computedTokens?: readonly number[],
  ): MatchedTokens {
    const state = this.#see(request);
    if (state.refusal !== undefined) {
      this.#forget(request.requestId, state);
      throw state.refusal;
    }
    if (state.phase !== "queued" || state.source === undefined) return NOTHING;
    state.numComputedTokens = numComputedTokens;
    state.computedTokens = computedTokens;
    const { numPromptTokens, kvTransferParams } = request;
    // D computes the last token in any case, because its logits give the next token.
    const own = Math.max(this.#ownTokens, Math.min(1, numPromptTokens - 1));
    if (numComputedTokens >= numPromptTokens - own) return NOTHING;
    const { numTokens = 0 } = state.source;
    const tokens = this.#tokensAtP(request, state.source) - numComputedTokens;
    // P computes what D has when it is little, or when D's state has already applied P's last
    // token.
    const isComputed =
      namesReadback(kvTransferParams) &&
      (tokens < this.#options.recomputeThresholdTokens ||
        (this.#options.backoff !== undefined && numTokens >= numPromptTokens));
    return tokens > 0 && !isComputed ? { tokens, async: true } : NOTHING;
  }

  /**
   * As `SchedulerConnector.afterAllocation`.
   * Groups have the computed tokens that `matched` got, if it is not said again.
   * @throws `KV_INTERNAL` for a group with more tokens than that.
   */
  allocated(
    request: ConnectorRequest,
    blockIds: BlockIds,
    externalTokens: number,
    computedTokens?: readonly number[],
  ): void {
    const state = this.#see(request);
    const { source, numComputedTokens, seenAtMs } = state;
    const matched = state.computedTokens ?? blockIds.map(() => numComputedTokens);
    if (state.phase !== "queued" || source === undefined) return;
    if (externalTokens === 0) {
      // The local prefix cache has the whole prompt.
      this.#releaseUnread(request, state);
      this.#enter(state, "ended");
      return;
    }
    const numTokens = numComputedTokens + externalTokens;
    const computed = computedTokens ?? matched;
    for (const [group, tokens = 0] of computed.entries()) {
      const known = matched[group] ?? 0;
      if (tokens <= known) continue;
      throw new KvError(
        "KV_INTERNAL",
        `request ${request.requestId} was allocated with ${tokens} computed tokens in KV cache group ${group}, and ${known} were matched`,
      );
    }
    const { config, dcpSize } = this.#options;
    const blocks = blocksToFetch(blockIds, computed, numTokens, config, dcpSize);
    const prompt = promptPrefix(request, numTokens);
    this.#orders.fetch(request.requestId, source, { numTokens, seenAtMs, prompt, ...blocks });
    state.phase = "fetching";
  }

  /** `isUnverified`: nobody compared the fetched KV with the prompt. */
  finished(request: ConnectorRequest): { readonly keepBlocks: boolean; isUnverified: boolean } {
    const state = this.#see(request);
    const { isUnverified } = state;
    return { isUnverified, keepBlocks: this.#keepsBlocks(request, state) };
  }

  #keepsBlocks(request: ConnectorRequest, state: RequestState<Source>): boolean {
    const { requestId } = request;
    switch (state.phase) {
      case "fetching":
        if (!this.#orders.cancelFetch(requestId)) {
          this.#orders.abort(requestId);
          this.#enter(state, "leaving");
          return true;
        }
        this.#releaseUnread(request, state);
        break;
      case "queued":
        this.#releaseUnread(request, state);
        break;
      case "at-risk":
        this.#enter(state, "leaving");
        return true;
      case "leaving":
        return true;
      case "ended":
        break;
    }
    this.#forget(requestId, state);
    return false;
  }

  /**
   * Called when every rank has received its part or failed. `blocksAtRisk`: a peer may still write
   * to the blocks.
   */
  received(requestId: string, blocksAtRisk: boolean, isUnverified: boolean): void {
    const state = this.#states.get(requestId);
    if (state === undefined) return;
    state.isUnverified ||= isUnverified;
    if (blocksAtRisk) {
      if (state.phase === "fetching") this.#enter(state, "at-risk");
      return;
    }
    this.#orders.ended?.(requestId);
    if (state.phase !== "queued" && state.phase !== "ended") {
      const remote = this.#removeReader(state);
      if (remote !== undefined) this.#orders.fetched?.(remote);
    }
    if (state.phase === "leaving") this.#forget(requestId, state);
    else if (state.phase !== "queued") this.#enter(state, "ended");
  }

  takeHeartbeats(): readonly HeartbeatChange[] {
    return this.#heartbeats.take();
  }

  get hasHeartbeats(): boolean {
    return this.#heartbeats.hasChanged;
  }

  get size(): number {
    return this.#states.size;
  }

  get heartbeats(): number {
    return this.#heartbeats.size;
  }

  close(): void {
    this.#states.clear();
    this.#heartbeats.clear();
    this.#references.clear();
  }

  #see(request: ConnectorRequest): RequestState<Source> {
    const known = this.#states.get(request.requestId);
    if (known !== undefined) return known;
    let params = request.kvTransferParams ?? {};
    const isReadback = namesReadback(params);
    let source: Source | undefined;
    let refusal: KvError | undefined;
    try {
      const { numPromptTokens } = request;
      if (isReadback) params = readbackParams(params);
      // The KV may hold the tokens that a shortened prompt leaves out.
      const leftOut = isReadback ? this.#ownTokens : 0;
      const read = this.#orders.read(params, numPromptTokens + leftOut);
      const { numTokens } = read;
      const hasAnswered = read.remote.blocks !== undefined;
      const { backoff } = this.#options;
      if (backoff !== undefined && !isReadback)
        requireLastTokensLeft(backoff, { numTokens, numPromptTokens, hasAnswered });
      const remote = { ...read.remote, ...traceMember(request.traceparent) };
      source = { ...read, remote };
    } catch (error) {
      refusal = KvError.from(error, "KV_REQUEST_INVALID", `request ${request.requestId}`);
      this.#releaseRefused(request, addressToNotify(params, this.#options.mode));
    }
    let reference: RemoteReference | undefined;
    try {
      reference = source && this.#references.add(source.remote);
    } catch (error) {
      refusal = KvError.from(error, "KV_INTERNAL", `request ${request.requestId}`);
      source = undefined;
    }
    const state: RequestState<Source> = {
      phase: refusal === undefined ? "queued" : "ended",
      source,
      reference,
      refusal,
      seenAtMs: this.#options.clock.now(),
      numComputedTokens: 0,
      computedTokens: undefined,
      isUnverified: false,
    };
    this.#states.set(request.requestId, state);
    if (source !== undefined) this.#heartbeats.add(source.remote);
    return state;
  }

  /** Tokens of the prompt that P has computed, or will where it has not answered. */
  #tokensAtP({ numPromptTokens }: ConnectorRequest, source: Source | undefined): number {
    return Math.min(numPromptTokens, source?.numTokens ?? numPromptTokens - this.#ownTokens);
  }

  #releaseUnread(request: ConnectorRequest, state: RequestState<Source>): void {
    const remote = this.#removeReader(state);
    if (remote !== undefined)
      this.#orders.release(request, remote, this.#tokensAtP(request, state.source));
  }

  #removeReader({ source, reference }: RequestState<Source>): RemoteRequest | undefined {
    const isLast = reference !== undefined && this.#references.remove(reference);
    return isLast ? source?.remote : undefined;
  }

  #releaseRefused(request: ConnectorRequest, remote: RemoteRequest | undefined): void {
    if (remote === undefined) return;
    let reference: RemoteReference;
    try {
      reference = this.#references.add(remote);
    } catch {
      return;
    }
    if (this.#references.remove(reference))
      this.#orders.release(request, remote, this.#tokensAtP(request, undefined));
  }

  #enter(state: RequestState<Source>, phase: Exclude<Phase, "queued" | "fetching">): void {
    this.#endHeartbeats(state);
    state.phase = phase;
  }

  #forget(requestId: string, state: RequestState<Source>): void {
    this.#endHeartbeats(state);
    this.#states.delete(requestId);
  }

  /** Only requests that wait or transfer have heartbeats. */
  #endHeartbeats({ phase, source }: RequestState<Source>): void {
    if (source !== undefined && (phase === "queued" || phase === "fetching"))
      this.#heartbeats.remove(source.remote);
  }
}

/** @throws `KV_REQUEST_INVALID` for a malformed token id. */
function promptPrefix(request: ConnectorRequest, numTokens: number): PromptPrefix | undefined {
  const content = promptContent(request);
  const digest = content === undefined ? undefined : promptDigest(content, numTokens);
  return digest === undefined ? undefined : { numTokens, digest };
}

/**
 * The blocks of `numTokens` prompt tokens that D lacks: without the local prefix hit
 * (`computedTokens`, per group or of all) and blocks that peers never exchange.
 */
export function blocksToFetch(
  blockIds: BlockIds,
  computedTokens: number | readonly number[],
  numTokens: number,
  config: KvCacheConfig,
  dcpSize = 1,
): BlocksToFetch {
  const computedBlocks = blockIds.map((_, group) =>
    Math.floor(
      (typeof computedTokens === "number" ? computedTokens : (computedTokens[group] ?? 0)) /
        ((config.groups[group]?.blockSize ?? config.blockSize) * dcpSize),
    ),
  );
  return {
    localBlockIds: exchangedBlocks(blockIds, config, { numTokens, dcpSize, computedBlocks }),
    localComputedBlocks: computedBlocks,
  };
}

interface Listed {
  readonly engine: ListedEngine;
  readonly request: HeartbeatRequest;
  /** A client may send one answer of P to several of D's requests. */
  count: number;
  isSent: boolean;
}

/** It has no registration number: one request must not decide for the others. */
interface ListedEngine {
  readonly address: EngineAddress;
  readonly requests: Map<string, Listed>;
}

/** The requests whose leases D extends. Workers get the changes of each step. */
export class HeartbeatSet {
  readonly #engines = new Map<string, ListedEngine>();
  readonly #touched = new Set<Listed>();
  #size = 0;

  add(remote: RemoteRequest): void {
    const key = engineKey(remote);
    let engine = this.#engines.get(key);
    if (engine === undefined) {
      engine = { address: addressOf(remote), requests: new Map() };
      this.#engines.set(key, engine);
    }
    const request = heartbeatRequest(remote);
    const name = heartbeatKey(request);
    let extended = engine.requests.get(name);
    if (extended === undefined) {
      extended = { engine, request, count: 0, isSent: false };
      engine.requests.set(name, extended);
    }
    extended.count += 1;
    this.#size += 1;
    this.#touched.add(extended);
  }

  remove(remote: RemoteRequest): void {
    const engine = this.#engines.get(engineKey(remote));
    const extended = engine?.requests.get(heartbeatKey(heartbeatRequest(remote)));
    if (extended === undefined || extended.count === 0) return;
    extended.count -= 1;
    this.#size -= 1;
    this.#touched.add(extended);
  }

  get hasChanged(): boolean {
    for (const { count, isSent } of this.#touched) if (count > 0 !== isSent) return true;
    return false;
  }

  take(): HeartbeatChange[] {
    const changes = new Map<ListedEngine, { begin: HeartbeatRequest[]; end: HeartbeatRequest[] }>();
    for (const extended of this.#touched) {
      const { engine, request, count, isSent } = extended;
      if (count > 0 !== isSent) {
        const change = changes.get(engine) ?? { begin: [], end: [] };
        changes.set(engine, change);
        change[isSent ? "end" : "begin"].push(request);
        extended.isSent = !isSent;
      }
      if (count > 0) continue;
      engine.requests.delete(heartbeatKey(request));
      if (engine.requests.size === 0) this.#engines.delete(engineKey(engine.address));
    }
    this.#touched.clear();
    return [...changes].map(([{ address }, change]) => ({ ...address, ...change }));
  }

  get size(): number {
    return this.#size;
  }

  clear(): void {
    this.#engines.clear();
    this.#touched.clear();
    this.#size = 0;
  }
}
