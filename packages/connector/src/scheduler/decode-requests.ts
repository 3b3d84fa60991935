import {
  type BlockIds,
  type Clock,
  type ConnectorRequest,
  type KvCacheConfig,
  KvError,
  type KvTransferParams,
  type MatchedTokens,
  type RequestFinished,
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
import { type RemoteReference, RemoteReferences } from "../requests/references.js";
import {
  addressOf,
  addressToNotify,
  type EngineAddress,
  engineKey,
  type HeartbeatRequest,
  heartbeatKey,
  heartbeatRequest,
  type RemoteRequest,
} from "../requests/remote-request.js";
import type { HeartbeatChange } from "../requests/step-metadata.js";

/** The P of a request, and how much of the prompt it has. */
export interface PromptSource {
  readonly remote: RemoteRequest;
  /**
   * Prompt tokens whose KV P has or will have; undefined when the parameters do not have the
   * number.
   */
  readonly numTokens?: number | undefined;
}

/** Blocks of D that P's KV goes into. */
export interface BlocksToFetch {
  /** Per KV cache group, without the blocks of the local prefix hit. */
  readonly localBlockIds: BlockIds;
  readonly localComputedBlocks: readonly number[];
}

/** One request to fetch. */
export interface FetchOrder extends BlocksToFetch {
  /** Tokens from the start of the prompt whose KV D will have. */
  readonly numTokens: number;
  /** When D's scheduler first saw the request, on its clock in ms. */
  readonly seenAtMs: number;
  /** These tokens of the prompt; undefined where the engine does not know them. */
  readonly prompt: PromptPrefix | undefined;
}

/** How a connector turns D's requests into orders for its workers. Pull and push have one each. */
export interface DecodeOrders<Source extends PromptSource, Step extends object> {
  readonly maxReaders: number;
  /**
   * Reads the parameters of a request with a prompt of `numPromptTokens`.
   * @throws `KV_REQUEST_INVALID`.
   */
  read(params: KvTransferParams, numPromptTokens: number): Source;
  fetch(requestId: string, source: Source, order: FetchOrder): void;
  cancelFetch(requestId: string): boolean;
  /** Orders the workers to abort a request that they already have. */
  abort(requestId: string): void;
  /**
   * Orders the workers to notify P that it may free the request's blocks, none of which were
   * fetched.
   */
  release(request: ConnectorRequest, remote: RemoteRequest): void;
  /**
   * Called when the last request that fetched P's blocks is done with them. Push's P knows it from
   * its WRITEs.
   */
  fetched?(remote: RemoteRequest): void;
  ended?(requestId: string): void;
  takeStep(): Step;
  readonly hasOrders: boolean;
  close?(): void;
}

/**
 * A request's state. `queued`: the workers have no orders. `fetching`: its blocks are being filled.
 * `leaving`: the engine aborted it while its blocks may still be filled. `at-risk`: it failed, the
 * engine has not ended it, and a peer may still write. `ended`: nothing is outstanding; kept until
 * the engine ends the request, so that it is not fetched twice.
 */
type Phase = "queued" | "fetching" | "leaving" | "at-risk" | "ended";

interface RequestState<Source> {
  phase: Phase;
  readonly source: Source | undefined;
  readonly reference: RemoteReference | undefined;
  readonly refusal: KvError | undefined;
  readonly seenAtMs: number;
  numComputedTokens: number;
  /** Whether nobody compared the KV that arrived with the prompt. */
  isUnverified: boolean;
}

/**
 * The requests that fetch KV, on the scheduler side, for pull and push: how many tokens the peer
 * supplies, which blocks to fetch, which leases to extend, and when the engine may have blocks
 * back. They are D's requests, and with `bidirectional_kv_xfer` also those of a P whose parameters
 * name blocks of a D: there the roles of P and D are exchanged, and the engine computes what it
 * does not get. vLLM 0.33 records progress in the request's own parameters (`do_remote_prefill`
 * becomes false); here each request has a state.
 */
export class DecodeRequests<Source extends PromptSource> {
  readonly #clock: Clock;
  readonly #config: KvCacheConfig;
  readonly #dcpSize: number;
  readonly #mode: TransferMode;
  readonly #orders: DecodeOrders<Source, object>;
  readonly #states = new Map<string, RequestState<Source>>();
  readonly #heartbeats = new HeartbeatSet();
  readonly #references: RemoteReferences;
  readonly #backoff: PrefillBackoff | undefined;
  readonly #recomputeThresholdTokens: number;

  /**
   * `rememberMs`: how long a released reference is refused, at least P's lease.
   * `recomputeThresholdTokens`: a P computes fewer tokens than this instead of reading them back.
   * `dcpSize`: the engine's.
   */
  constructor(options: {
    readonly clock: Clock;
    readonly config: KvCacheConfig;
    readonly dcpSize: number;
    readonly mode: TransferMode;
    readonly orders: DecodeOrders<Source, object>;
    readonly rememberMs: number;
    readonly backoff?: PrefillBackoff | undefined;
    readonly recomputeThresholdTokens?: number | undefined;
  }) {
    const { clock, orders, rememberMs } = options;
    this.#clock = clock;
    this.#config = options.config;
    this.#dcpSize = options.dcpSize;
    this.#mode = options.mode;
    this.#backoff = options.backoff;
    this.#recomputeThresholdTokens = options.recomputeThresholdTokens ?? 0;
    this.#orders = orders;
    this.#references = new RemoteReferences({ clock, rememberMs, maxReaders: orders.maxReaders });
  }

  /**
   * Called when the engine has queued a request. Heartbeats begin. `matched` does the same, for
   * engines that do not report the queue.
   */
  queued(request: ConnectorRequest): void {
    this.#see(request);
  }

  /**
   * As `SchedulerConnector.matchedTokens`.
   * @throws `KV_REQUEST_INVALID`, `KV_PLAN_UNSUPPORTED`, `KV_REFERENCE_USED`, `KV_REFERENCES_FULL`.
   */
  matched(request: ConnectorRequest, numComputedTokens: number): MatchedTokens {
    const state = this.#see(request);
    if (state.refusal !== undefined) throw state.refusal;
    if (state.phase !== "queued" || state.source === undefined) return { tokens: 0, async: false };
    state.numComputedTokens = numComputedTokens;
    const { numPromptTokens } = request;
    // A full prefix hit. D computes the last token in any case, because its logits give the next
    // token.
    const own = Math.max(this.#backoff?.tokens ?? 0, Math.min(1, numPromptTokens - 1));
    if (numComputedTokens >= numPromptTokens - own) return { tokens: 0, async: false };
    const left = numPromptTokens - (this.#backoff?.tokens ?? 0);
    const tokens = Math.min(numPromptTokens, state.source.numTokens ?? left) - numComputedTokens;
    const isComputed = this.#isComputed(request, state.source, tokens);
    return tokens > 0 && !isComputed ? { tokens, async: true } : { tokens: 0, async: false };
  }

  /**
   * Whether P computes the tokens although the D of the last turn has them: there are few, or its
   * state has P's last token already, which P computes in any case and would apply to it twice.
   */
  #isComputed(
    { kvTransferParams, numPromptTokens }: ConnectorRequest,
    { numTokens = 0 }: Source,
    tokens: number,
  ): boolean {
    if (!namesReadback(kvTransferParams)) return false;
    const isStateTooFar = this.#backoff !== undefined && numTokens >= numPromptTokens;
    return isStateTooFar || tokens < this.#recomputeThresholdTokens;
  }

  /**
   * As `SchedulerConnector.afterAllocation`.
   * @throws `KV_INTERNAL` for a group that has more tokens than `matched` was told.
   */
  allocated(
    request: ConnectorRequest,
    blockIds: BlockIds,
    externalTokens: number,
    computedTokens?: readonly number[],
  ): void {
    const state = this.#see(request);
    const { source, numComputedTokens, seenAtMs } = state;
    if (state.phase !== "queued" || source === undefined) return;
    if (externalTokens === 0) {
      // The local prefix cache has the whole prompt: there is nothing to fetch, and the engine does
      // not wait.
      this.#releaseUnread(request, state);
      this.#enter(state, "ended");
      return;
    }
    const numTokens = numComputedTokens + externalTokens;
    const deepest = Math.max(0, ...(computedTokens ?? []));
    if (deepest > numComputedTokens) {
      throw new KvError(
        "KV_INTERNAL",
        `request ${request.requestId} was allocated with ${deepest} computed tokens in a KV cache group, and ${numComputedTokens} were matched`,
      );
    }
    const blocks = blocksToFetch(
      blockIds,
      computedTokens ?? numComputedTokens,
      numTokens,
      this.#config,
      this.#dcpSize,
    );
    const prompt = promptPrefix(request, numTokens);
    this.#orders.fetch(request.requestId, source, { numTokens, seenAtMs, prompt, ...blocks });
    state.phase = "fetching";
  }

  /**
   * As `SchedulerConnector.requestFinished`. `isUnverified`: nobody compared the KV that it got
   * with its prompt.
   */
  finished(request: ConnectorRequest): RequestFinished & { readonly isUnverified: boolean } {
    const state = this.#see(request);
    return { isUnverified: state.isUnverified, ...this.#finished(request, state) };
  }

  #finished(request: ConnectorRequest, state: RequestState<Source>): RequestFinished {
    const { requestId } = request;
    switch (state.phase) {
      case "fetching":
        if (!this.#orders.cancelFetch(requestId)) {
          this.#orders.abort(requestId);
          this.#enter(state, "leaving");
          return { keepBlocks: true };
        }
        // The workers do not know the request: nothing touches its blocks.
        this.#releaseUnread(request, state);
        break;
      case "queued":
        this.#releaseUnread(request, state);
        break;
      case "at-risk":
        this.#enter(state, "leaving");
        return { keepBlocks: true };
      case "leaving":
        return { keepBlocks: true };
      case "ended":
        break;
    }
    this.#forget(requestId, state);
    return { keepBlocks: false };
  }

  /**
   * Called when every rank has received its part or has failed. `blocksAtRisk`: it failed, and a
   * peer may still write to the blocks. `isUnverified`: nobody compared the KV with the prompt.
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

  /** Which leases are to be extended, and which no longer, since the last call. */
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
      // P computes a shortened prompt. The KV may also hold the tokens that it leaves out.
      const leftOut = isReadback ? (this.#backoff?.tokens ?? 0) : 0;
      const read = this.#orders.read(params, numPromptTokens + leftOut);
      const { numTokens } = read;
      const hasAnswered = read.remote.blocks !== undefined;
      if (this.#backoff !== undefined && !isReadback)
        requireLastTokensLeft(this.#backoff, { numTokens, numPromptTokens, hasAnswered });
      source = read;
      const { traceparent } = request;
      if (traceparent !== undefined)
        source = { ...source, remote: { ...source.remote, traceparent } };
    } catch (error) {
      refusal = KvError.from(error, "KV_REQUEST_INVALID", `request ${request.requestId}`);
      this.#releaseRefused(request, addressToNotify(params, this.#mode));
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
      seenAtMs: this.#clock.now(),
      numComputedTokens: 0,
      isUnverified: false,
    };
    this.#states.set(request.requestId, state);
    if (source !== undefined) this.#heartbeats.add(source.remote);
    return state;
  }

  /** Ends the use of P's blocks by a request that has fetched none of them. */
  #releaseUnread(request: ConnectorRequest, state: RequestState<Source>): void {
    const remote = this.#removeReader(state);
    if (remote !== undefined) this.#orders.release(request, remote);
  }

  /** The request at P that no reader is left of; undefined while others read it. */
  #removeReader({ source, reference }: RequestState<Source>): RemoteRequest | undefined {
    const isLast = reference !== undefined && this.#references.remove(reference);
    return isLast ? source?.remote : undefined;
  }

  /**
   * Releases the blocks of refused parameters, unless another request reads them, or they were
   * released before.
   */
  #releaseRefused(request: ConnectorRequest, remote: RemoteRequest | undefined): void {
    if (remote === undefined) return;
    let reference: RemoteReference;
    try {
      reference = this.#references.add(remote);
    } catch {
      return;
    }
    if (this.#references.remove(reference)) this.#orders.release(request, remote);
  }

  #enter(state: RequestState<Source>, phase: Exclude<Phase, "queued" | "fetching">): void {
    this.#endHeartbeats(state);
    state.phase = phase;
  }

  #forget(requestId: string, state: RequestState<Source>): void {
    this.#endHeartbeats(state);
    this.#states.delete(requestId);
  }

  /** Only the lease of a request that waits or transfers is extended. */
  #endHeartbeats({ phase, source }: RequestState<Source>): void {
    if (source !== undefined && (phase === "queued" || phase === "fetching"))
      this.#heartbeats.remove(source.remote);
  }
}

/**
 * The first `numTokens` of a request's prompt, for P to compare.
 * @throws `KV_REQUEST_INVALID` for a malformed token id.
 */
function promptPrefix(request: ConnectorRequest, numTokens: number): PromptPrefix | undefined {
  const content = promptContent(request);
  const digest = content === undefined ? undefined : promptDigest(content, numTokens);
  return digest === undefined ? undefined : { numTokens, digest };
}

/**
 * The blocks of `numTokens` prompt tokens that D lacks: those of the local prefix hit
 * (`computedTokens`, of all groups or of each) come first and are left out, as are blocks that
 * peers never exchange.
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

/** A request of an engine in the set. */
interface Listed {
  readonly engine: ListedEngine;
  readonly request: HeartbeatRequest;
  /** How many of D's requests name it: a client may send one answer of P twice. */
  count: number;
  isSent: boolean;
}

/**
 * The address names no registration of the engine's cache: heartbeats need no memory of the engine,
 * and one request must not decide for the others.
 */
interface ListedEngine {
  readonly address: EngineAddress;
  readonly requests: Map<string, Listed>;
}

/** The requests whose leases D extends. The workers get what has changed since the last step. */
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
