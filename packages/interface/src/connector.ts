import type { KvErrorCode } from "./errors.js";
import type { BlockIds, KvCaches } from "./kv-cache.js";

/**
 * A connector has two sides, perhaps in different processes. The scheduler side decides, one per
 * engine; the worker side moves bytes, one per rank. They exchange plain data that survives JSON
 * and structured clone. Sides and calls are those of vLLM 0.33's `KVConnectorBase_V1`.
 *
 * The engine calls in each step:
 *
 * 1. scheduler: `matchedTokens`, then `afterAllocation`, for each request that it admits;
 * 2. scheduler: `buildStepMetadata`;
 * 3. every worker: `startLoad`, then the forward pass with `layerComputed`, then `waitForSave` and
 * `collectFinished`;
 * 4. scheduler: `applyWorkerOutput`.
 *
 * Every implementation runs the suite `@kv/conformance/connector`.
 */

/**
 * `kv_transfer_params` of an OpenAI-style request or response: untrusted, with unknown keys kept.
 */
export type KvTransferParams = Readonly<Record<string, unknown>>;

/** A request as a connector sees it. */
export interface ConnectorRequest {
  /** Unique among requests that have not ended. */
  readonly requestId: string;
  readonly numPromptTokens: number;
  /**
   * Ids of the prompt's tokens, 0 to 2^31 - 1, which an `@kv` P and D compare before D uses the KV.
   * Undefined: only vLLM peers can serve or read the request.
   */
  readonly promptTokenIds?: ArrayLike<number> | undefined;
  /**
   * What else decides the prompt's KV, such as LoRA adapter, cache salt and image hashes, in the
   * engine's own form; equal at P and D. @default nothing besides the tokens
   */
  readonly contentKey?: string | undefined;
  readonly kvTransferParams: KvTransferParams | undefined;
  /**
   * In `requestFinished`: tokens from the start of the sequence whose KV the blocks hold (vLLM:
   * `num_computed_tokens`). Nobody computes the last output token's. Absent: a decode engine keeps
   * nothing for `bidirectional_kv_xfer`.
   */
  readonly numComputedTokens?: number | undefined;
  /**
   * In `requestFinished`: ids of the generated tokens, which an `@kv` P compares with its prompt
   * before it reads the KV back. Absent: only a vLLM P can.
   */
  readonly outputTokenIds?: ArrayLike<number> | undefined;
  /**
   * All that decides how the first output token is sampled, in the engine's own form, 1 to 256
   * characters. `SchedulerConnector.firstToken` needs equal keys at P and D. Absent where P's token
   * cannot stand for D's, as for log probabilities or several outputs. @default D samples the first
   * token
   */
  readonly samplingKey?: string | undefined;
  /** W3C `traceparent` of the engine's span, parent of the connector's. */
  readonly traceparent?: string | undefined;
}

/**
 * Where KV that an engine did not compute comes from (vLLM 0.33: `CacheHitSource`), as in vLLM's
 * metric `vllm:prompt_tokens_cached_by_source`.
 */
export const CACHE_HIT_SOURCES = ["device", "host", "p2p", "disk", "external_unspecified"] as const;
/** One of `CACHE_HIT_SOURCES`. */
export type CacheHitSource = (typeof CACHE_HIT_SOURCES)[number];

/** Result of `SchedulerConnector.matchedTokens`. */
export interface MatchedTokens {
  /** Prompt tokens from a peer, beyond those computed locally. */
  readonly tokens: number;
  /** True: the request waits until a worker output reports it received. */
  readonly async: boolean;
  /**
   * True: no room now. The engine allocates nothing and asks again in a later step (vLLM:
   * `get_num_new_matched_tokens` returns `None`).
   * @default false
   */
  readonly wait?: boolean | undefined;
}

/**
 * `stopped` and `length` offer the blocks to a peer (vLLM: `FINISHED_STOPPED`,
 * `FINISHED_LENGTH_CAPPED`); the others free them.
 */
export type FinishReason = "stopped" | "length" | "aborted" | "error";

/** Result of `SchedulerConnector.requestFinished`. */
export interface RequestFinished {
  /**
   * True: the engine keeps the blocks until a worker output reports the request, in
   * `finishedSending` if peers may read them, in `finishedReceiving` if a transfer writes them.
   */
  readonly keepBlocks: boolean;
  /** The response carries them to the client or proxy, which passes them on. */
  readonly kvTransferParams?: KvTransferParams | undefined;
}

/** One step's work for every worker: plain data that engines pass on unread. */
export interface StepMetadata {
  readonly connector: string;
  readonly step: number;
  readonly [key: string]: unknown;
}

/** A request whose KV did not arrive. Plain data. */
export interface FailedReceive {
  readonly requestId: string;
  readonly code: KvErrorCode;
  readonly message: string;
  /** vLLM's `failure_type`, such as "handshake_failed" or "transfer_failed". */
  readonly failureType: string;
  /** Those of `failedBlockIds` that belong to this request. Empty with several KV cache groups. */
  readonly blockIds?: readonly number[] | undefined;
  /**
   * True: an unreachable peer may still write to the blocks. The request fails under either
   * `LoadFailurePolicy`, `requestFinished` returns `keepBlocks`, and a later output reports it
   * received once more. @default false
   */
  readonly blocksAtRisk?: boolean | undefined;
}

/** A layer whose KV is in place while the forward pass continues. Plain data. */
export interface ComputedLayer {
  /** The layer's names in `KvCaches.regions`. */
  readonly regions: readonly string[];
  /** By request id: tokens whose KV these regions hold. Requests without new ones are left out. */
  readonly computedTokens: Readonly<Record<string, number>>;
}

/** One worker's report after a step. Plain data; block ids are local. */
export interface WorkerOutput {
  /**
   * Requests whose readers have all finished or whose lease expired. The engine frees their blocks.
   */
  readonly finishedSending: readonly string[];
  /**
   * Requests whose KV is in place, or that are in `failedReceiving`. No transfer touches their
   * blocks any more, except where `FailedReceive.blocksAtRisk` is true.
   */
  readonly finishedReceiving: readonly string[];
  /**
   * Those of `finishedReceiving` whose KV comes from a vLLM, directly or not, so that nobody
   * compared it with their prompt. The engine keeps their blocks, and what it computes after them,
   * out of its prefix cache. @default none
   */
  readonly unverifiedReceiving?: readonly string[] | undefined;
  readonly failedReceiving: readonly FailedReceive[];
  /**
   * Blocks with invalid content, which the engine recomputes or whose requests it fails. Empty with
   * several KV cache groups: all received blocks of `failedReceiving` are then invalid.
   */
  readonly failedBlockIds: readonly number[];
  /** Only the connector's own scheduler side reads it. */
  readonly connectorData?: unknown;
}

/** What happens to a request whose KV did not arrive (vLLM: `kv_load_failure_policy`). */
export type LoadFailurePolicy = "fail" | "recompute";

/**
 * The scheduler side of a connector. The engine calls it from one thread of control and closes it.
 */
export interface SchedulerConnector {
  readonly name: string;
  readonly loadFailurePolicy: LoadFailurePolicy;
  /**
   * Publishes all workers' handshake metadata and opens the listener (vLLM:
   * `set_xfer_handshake_metadata`). Call it before the first request and after each later
   * `registerKvCaches`.
   *
   * @throws `KV_SIDE_CHANNEL_BIND_FAILED`.
   */
  setHandshakeMetadata(workers: readonly WorkerHandshakeMetadata[]): Promise<void>;
  /**
   * Called when the engine accepts a request, which may queue before `matchedTokens` (vLLM:
   * `on_new_request`). Heartbeats begin here. Invalid parameters do not throw yet.
   */
  requestQueued?(request: ConnectorRequest): void;
  /**
   * Returns how many of its prompt's first tokens the engine computes for a request (vLLM:
   * `_truncate_request_for_prefill`): with states, the decode engine computes the last ones. Call
   * it before all other methods; to them and the engine, the request then has that many prompt
   * tokens and one output token. Where it is needed and was not called, `matchedTokens` refuses
   * prefill requests: `KV_PLAN_UNSUPPORTED`.
   */
  tokensToPrefill?(request: ConnectorRequest): number;
  /**
   * Returns how many tokens a peer supplies (vLLM: `get_num_new_matched_tokens`); the engine may
   * ask repeatedly. `computedTokens` is by KV cache group, where some have less than
   * `numComputedTokens`, the default, as when a state is gone (vLLM:
   * `supports_divergent_local_hybrid_hits`). A result above 0 completes all groups; at 0 the engine
   * goes back to what all have.
   *
   * @throws `KV_REQUEST_INVALID` for invalid parameters; `KV_PLAN_UNSUPPORTED` where a peer's KV
   * cannot serve this cache. The peer's blocks are then released where the protocol allows.
   */
  matchedTokens(
    request: ConnectorRequest,
    numComputedTokens: number,
    computedTokens?: readonly number[],
  ): MatchedTokens;
  /**
   * Source of the last `matchedTokens` (vLLM: `get_external_cache_hit_sources`). Absent:
   * "external_unspecified".
   */
  cacheHitSource?(request: ConnectorRequest): CacheHitSource;
  /**
   * Returns the first output token that P sampled with an equal `samplingKey` (`seed_first_token`;
   * vllm#51919, in no release). Ask when the whole prompt's KV has arrived; the engine emits it
   * instead of computing the last prompt token. Undefined: the engine samples. Never throws.
   */
  firstToken?(request: ConnectorRequest): number | undefined;
  /**
   * Passes an admitted request's blocks, local prefix hits first (vLLM:
   * `update_state_after_alloc`). `externalTokens` is `tokens` of `matchedTokens`, or 0 when all are
   * computed locally.
   */
  afterAllocation(
    request: ConnectorRequest,
    blockIds: BlockIds,
    externalTokens: number,
    computedTokens?: readonly number[],
  ): void;
  /** Returns one step's work for every worker (vLLM: `build_connector_meta`). */
  buildStepMetadata(): StepMetadata;
  /** Called once when a request ends, before its blocks are freed (vLLM: `request_finished`). */
  requestFinished(
    request: ConnectorRequest,
    blockIds: BlockIds,
    reason: FinishReason,
  ): RequestFinished;
  /**
   * Passes the merged output of all workers (vLLM: `update_connector_output`), with the requests
   * that every rank has reported. Call it before freeing their blocks.
   */
  applyWorkerOutput(output: WorkerOutput): void;
  /** Returns true while work needs engine steps although no request runs. */
  hasPendingWork(): boolean;
  /**
   * Returns counts of what is held, under the connector's own keys. All but `listeners` are zero
   * after the last request.
   */
  outstanding(): Readonly<Record<string, number>>;
  /** Closes the listener and drops all state. Close the workers first. Idempotent. */
  close(): Promise<void>;
}

/** Handshake metadata of one worker. Plain data apart from the bytes. */
export interface WorkerHandshakeMetadata {
  readonly tpRank: number;
  readonly ppRank: number;
  /** In the connector's own encoding; the engine passes it on unread. */
  readonly payload: Uint8Array;
}

/** The worker side of a connector. The engine owns and closes it. */
export interface WorkerConnector {
  readonly name: string;
  /**
   * Registers the caches with the transport (vLLM: `register_kv_caches`), before the first step and
   * after `unregisterKvCaches`. The memory stays open until that or `close` resolves.
   *
   * @throws those of the transport, and of `@kv/plan` for caches that cannot be transferred.
   */
  registerKvCaches(caches: KvCaches): Promise<void>;
  /**
   * Takes the caches back from the transport, so that a sleeping engine may release or move their
   * memory (vLLM: `unregister_kv_caches`). The engine first ends or preempts what it computes.
   * Resolves when no transfer can touch the caches. The next output has requests whose KV was
   * arriving, with `KV_MEMORY_NOT_REGISTERED`, and in `finishedSending` those that waited for
   * readers. A request that ended after the last step follows after the first step awake. Before
   * that step, call `registerKvCaches` (vLLM: `restore_kv_caches`), `handshakeMetadata` and
   * `SchedulerConnector.setHandshakeMetadata`. Absent: the engine cannot sleep.
   */
  unregisterKvCaches?(): Promise<void>;
  /** Metadata for `SchedulerConnector.setHandshakeMetadata` (vLLM: `get_handshake_metadata`). */
  handshakeMetadata(): Promise<WorkerHandshakeMetadata>;
  /**
   * Starts a step's work without waiting for a peer (vLLM: `start_load_kv`). A later output reports
   * failures.
   */
  startLoad(step: StepMetadata): void;
  /**
   * Called between `startLoad` and `waitForSave` when a layer's KV is in place (vLLM:
   * `save_kv_layer`). From then on, a request's blocks stay allocated until `requestFinished`
   * releases them. Does not wait. Optional for engine and connector.
   */
  layerComputed?(layer: ComputedLayer): void;
  /**
   * Resolves when device blocks that a peer may read are staged, if any are (vLLM:
   * `wait_for_save`). `computed` gives, by request id, the tokens whose KV is on the device. A
   * request named before and left out has no new tokens; one never named counts as computed. Name a
   * request with all its prompt tokens in the step that computes the last one.
   *
   * @throws `KV_STAGING_FAILED` with `details.requestIds`: the engine ends these with the reason
   * `error`; all others are staged.
   */
  waitForSave(step: StepMetadata, computed?: Readonly<Record<string, number>>): Promise<void>;
  /** Returns what finished or failed since the last call (vLLM: `get_finished`). */
  collectFinished(): WorkerOutput;
  /** Adds a listener for news in `collectFinished`; an idle engine then need not poll. */
  onProgress(listener: () => void): void;
  outstanding(): Readonly<Record<string, number>>;
  /** Waits until no transfer touches the caches, then releases everything. Idempotent. */
  close(): Promise<void>;
}
