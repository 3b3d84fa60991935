import type { KvErrorCode } from "./errors.js";
import type { BlockIds, KvCaches } from "./kv-cache.js";
/**
 * A connector has two sides, which may live in different processes. The scheduler side decides;
 * there is one for each engine. The worker side moves bytes; there is one for each rank. The two
 * exchange only plain data that survives JSON and structured clone: `StepMetadata`, `WorkerOutput`
 * and handshake metadata. The division and the order of calls are those of vLLM 0.33's
 * `KVConnectorBase_V1`, under names of this project.
 *
 * The engine makes these calls in each step:
 *
 * 1. scheduler: `matchedTokens`, then `afterAllocation`, for each request that it admits;
 * 2. scheduler: `buildStepMetadata`;
 * 3. every worker: `startLoad`, then the forward pass with `layerComputed`, then `waitForSave` and
 * `collectFinished`;
 * 4. scheduler: `applyWorkerOutput`.
 *
 * Every implementation runs the suite `@kv/conformance/connector`. `Symbol.asyncDispose` is not
 * part of the contract: the engine that owns both sides calls `close`.
 */
/**
 * `kv_transfer_params` of an OpenAI-style request or response, as on the wire. Untrusted input;
 * unknown keys are kept.
 */
export type KvTransferParams = Readonly<Record<string, unknown>>;
/** A request as a connector sees it. */
export interface ConnectorRequest {
    /** The engine's id of the request, unique among requests that have not ended. */
    readonly requestId: string;
    /** Tokens of the prompt. */
    readonly numPromptTokens: number;
    /**
     * Ids of the prompt's tokens, 0 to 2^31 - 1; as many as `numPromptTokens`. An `@kv` P and D
     * compare them, so that D never uses the KV of another prompt. Undefined where the engine does
     * not know them: such a D is served by a vLLM P only, and such a P serves vLLM D's only.
     */
    readonly promptTokenIds?: ArrayLike<number> | undefined;
    /**
     * Everything besides the tokens that decides the prompt's KV, in the engine's own form: what its
     * block hash covers, such as the LoRA adapter, the cache salt and the hashes of images. Equal at
     * P and D for the same prompt. @default nothing besides the tokens
     */
    readonly contentKey?: string | undefined;
    /** Parameters that came with the request; undefined when there were none. */
    readonly kvTransferParams: KvTransferParams | undefined;
    /**
     * In `requestFinished`: tokens from the start of the sequence whose KV the blocks hold, those of
     * the output included but for the last one, whose KV nobody computes (vLLM:
     * `num_computed_tokens`). Absent: a decode engine keeps nothing for `bidirectional_kv_xfer`.
     */
    readonly numComputedTokens?: number | undefined;
    /**
     * In `requestFinished`: ids of the tokens that the engine has generated. An `@kv` P compares them
     * with its prompt before it uses the KV of a decode engine. Absent: only a vLLM P can read that
     * KV back.
     */
    readonly outputTokenIds?: ArrayLike<number> | undefined;
    /**
     * All that decides how the first output token is sampled (temperature, seed and so on), in the
     * engine's own form, 1 to 256 characters; equal at P and D for the same request.
     * `SchedulerConnector.firstToken` compares the two. Absent where P's token cannot stand for D's:
     * D is asked for its log probability, or for several outputs. @default D samples the first token
     */
    readonly samplingKey?: string | undefined;
    /**
     * W3C `traceparent` of the engine's span of the request: the parent of the connector's spans.
     * Absent: parameters of an `@kv` peer may have one.
     */
    readonly traceparent?: string | undefined;
}
/**
 * Where KV that an engine did not compute comes from (vLLM 0.33: `CacheHitSource`): its own device,
 * its host memory, a peer, a disk, or unknown. Label `source` of vLLM's metric
 * `vllm:prompt_tokens_cached_by_source`.
 */
export declare const CACHE_HIT_SOURCES: readonly ["device", "host", "p2p", "disk", "external_unspecified"];
/** One of `CACHE_HIT_SOURCES`. */
export type CacheHitSource = (typeof CACHE_HIT_SOURCES)[number];
/** Result of `SchedulerConnector.matchedTokens`. */
export interface MatchedTokens {
    /** Prompt tokens, beyond those computed locally, whose KV a peer supplies. */
    readonly tokens: number;
    /**
     * True: the KV arrives while the engine does other work. The request waits until a worker output
     * reports it as received.
     */
    readonly async: boolean;
    /**
     * True: the connector has no room for the request now. The engine allocates nothing and calls
     * `matchedTokens` again in a later step (vLLM: `get_num_new_matched_tokens` returns `None`).
     * @default false
     */
    readonly wait?: boolean | undefined;
}
/**
 * Why a request ended. `stopped` and `length` offer its blocks to a peer; the others free them
 * (vLLM: `FINISHED_STOPPED`, `FINISHED_LENGTH_CAPPED`, and the rest of `RequestStatus`).
 */
export type FinishReason = "stopped" | "length" | "aborted" | "error";
/** Result of `SchedulerConnector.requestFinished`. */
export interface RequestFinished {
    /**
     * True: the engine must keep the blocks until a worker output reports the request. That is
     * `finishedSending` where peers may read the blocks, `finishedReceiving` where a transfer into
     * them is in progress.
     */
    readonly keepBlocks: boolean;
    /**
     * Parameters for the response to the client or proxy, which passes them to the other side.
     * Absent: none.
     */
    readonly kvTransferParams?: KvTransferParams | undefined;
}
/**
 * Work of one step for every worker. Plain data that a connector makes for its own worker side;
 * engines only pass it on.
 */
export interface StepMetadata {
    /** Name of the connector that made it. */
    readonly connector: string;
    /** Number of the step, counted from the scheduler's creation. */
    readonly step: number;
    /** The connector's own data. */
    readonly [key: string]: unknown;
}
/** A request whose KV did not arrive. Plain data. */
export interface FailedReceive {
    /** The engine's id of the request. */
    readonly requestId: string;
    /** Code of the error. */
    readonly code: KvErrorCode;
    /** Message of the error. */
    readonly message: string;
    /** vLLM's `failure_type`, such as "handshake_failed" or "transfer_failed". */
    readonly failureType: string;
    /**
     * The part of `failedBlockIds` that belongs to this request, so that outputs of several workers
     * can be merged. Empty with several KV cache groups.
     */
    readonly blockIds?: readonly number[] | undefined;
    /**
     * True: a peer that cannot be reached may still write to the request's blocks. The request fails
     * under either `LoadFailurePolicy`; `requestFinished` returns `keepBlocks`, and a later output
     * reports the request as received once more. @default false
     */
    readonly blocksAtRisk?: boolean | undefined;
}
/** A layer whose KV is computed while the forward pass continues. Plain data. */
export interface ComputedLayer {
    /** Names of the layer's regions in `KvCaches.regions`. */
    readonly regions: readonly string[];
    /**
     * Tokens of each request whose KV these regions hold now, by request id. A request that it leaves
     * out has no new ones.
     */
    readonly computedTokens: Readonly<Record<string, number>>;
}
/** Report of one worker after a step. Plain data. Block ids are local. */
export interface WorkerOutput {
    /**
     * Requests whose readers have all finished, or whose lease expired, at P and at a D whose KV is
     * read back. The engine frees their blocks.
     */
    readonly finishedSending: readonly string[];
    /**
     * Requests whose KV is in place, at D and at a P that reads the last turn back, or that are in
     * `failedReceiving`. No transfer touches their blocks any more, except where
     * `FailedReceive.blocksAtRisk` is true.
     */
    readonly finishedReceiving: readonly string[];
    /**
     * Those of `finishedReceiving` whose KV nobody compared with their prompt, because the peer is a
     * vLLM, or has its KV from one. Their blocks serve these requests alone: the engine enters no
     * block of them in its prefix cache, nor what it computes after them. That is so at D, and at a P
     * that reads the last turn back. @default none
     */
    readonly unverifiedReceiving?: readonly string[] | undefined;
    /** Requests whose KV did not arrive. */
    readonly failedReceiving: readonly FailedReceive[];
    /**
     * Blocks with invalid content, of caches with one KV cache group. Empty with several groups:
     * `failedReceiving` then names the requests, and all of their received blocks are invalid. The
     * engine recomputes or fails the requests that use them.
     */
    readonly failedBlockIds: readonly number[];
    /** Data for the connector's own scheduler side. */
    readonly connectorData?: unknown;
}
/** What the engine does with a request whose KV did not arrive (vLLM: `kv_load_failure_policy`). */
export type LoadFailurePolicy = "fail" | "recompute";
/**
 * The scheduler side of a connector. The engine owns it, calls it from one thread of control, and
 * closes it.
 */
export interface SchedulerConnector {
    /** Name of the connector. */
    readonly name: string;
    /** Policy for requests whose KV did not arrive, from the configuration. */
    readonly loadFailurePolicy: LoadFailurePolicy;
    /**
     * Publishes the handshake metadata of all workers and opens the side-channel listener (vLLM:
     * `set_xfer_handshake_metadata`). Call it once, before the first request, and again after the
     * caches were registered again (`WorkerConnector.unregisterKvCaches`): peers then shake hands
     * anew. Errors: `KV_SIDE_CHANNEL_BIND_FAILED`.
     */
    setHandshakeMetadata(workers: readonly WorkerHandshakeMetadata[]): Promise<void>;
    /**
     * Called when the engine has accepted a request, which may wait in its queue before
     * `matchedTokens` (vLLM: `on_new_request`). Heartbeats to the peer begin here. It does not throw
     * for invalid parameters; `matchedTokens` does.
     */
    requestQueued?(request: ConnectorRequest): void;
    /**
     * Returns how many of its prompt's first tokens the engine computes for a request (vLLM:
     * `_truncate_request_for_prefill`): all of them, or fewer where the decode engine must compute
     * the last ones itself, because its cache has states. Call it before any other method for the
     * request. Where the number is smaller, the engine takes the request for one with a prompt of so
     * many tokens and one token of output, also in the calls that follow. A connector that needs this
     * refuses prefill requests of engines that do not call it: `KV_PLAN_UNSUPPORTED` from
     * `matchedTokens`.
     */
    tokensToPrefill?(request: ConnectorRequest): number;
    /**
     * Returns how many tokens a peer supplies (vLLM: `get_num_new_matched_tokens`). The engine may
     * call it more than once for a request. Errors: `KV_REQUEST_INVALID` for invalid parameters,
     * `KV_PLAN_UNSUPPORTED` for a cache with which a peer's KV cannot serve the request; the
     * connector then releases the peer's blocks where the protocol allows. `computedTokens` gives the
     * tokens that each KV cache group has, where some have fewer than `numComputedTokens` (vLLM:
     * `supports_divergent_local_hybrid_hits`): a state may be gone while the attention's blocks are
     * cached. A result above 0 completes all groups; at 0 the engine must go back to what all of them
     * have. Default: `numComputedTokens` for each.
     */
    matchedTokens(request: ConnectorRequest, numComputedTokens: number, computedTokens?: readonly number[]): MatchedTokens;
    /**
     * Where the tokens of the request's last `matchedTokens` come from (vLLM:
     * `get_external_cache_hit_sources`). Absent: "external_unspecified".
     */
    cacheHitSource?(request: ConnectorRequest): CacheHitSource;
    /**
     * Returns the first output token, which P has sampled with this engine's `samplingKey`
     * (`seed_first_token`; vllm#51919, in no release). Ask when the KV of the whole prompt has
     * arrived: the engine then emits this token in place of computing the last one of the prompt.
     * Undefined: the engine samples it. Throws nothing; `matchedTokens` has refused malformed
     * parameters.
     */
    firstToken?(request: ConnectorRequest): number | undefined;
    /**
     * Passes the blocks of an admitted request, those of a local prefix hit first (vLLM:
     * `update_state_after_alloc`). `externalTokens` is the `tokens` of `matchedTokens`; 0 when all
     * tokens are computed locally. `computedTokens` as in the last call of `matchedTokens`.
     */
    afterAllocation(request: ConnectorRequest, blockIds: BlockIds, externalTokens: number, computedTokens?: readonly number[]): void;
    /** Returns the work of this step for every worker (vLLM: `build_connector_meta`). */
    buildStepMetadata(): StepMetadata;
    /**
     * Called once when a request ends or is aborted, before its blocks are freed (vLLM:
     * `request_finished`). The result says whether the engine must keep the blocks.
     */
    requestFinished(request: ConnectorRequest, blockIds: BlockIds, reason: FinishReason): RequestFinished;
    /**
     * Passes the merged output of all workers of a step (vLLM: `update_connector_output`). A merged
     * output lists a request when every rank has reported it. Call it before freeing blocks that the
     * output reports.
     */
    applyWorkerOutput(output: WorkerOutput): void;
    /** Returns true while work is outstanding that needs engine steps although no request runs. */
    hasPendingWork(): boolean;
    /**
     * Returns counts of the requests, leases, timers and listeners held. All but `listeners` are zero
     * after the last request. For tests and status endpoints; the keys are the connector's own.
     */
    outstanding(): Readonly<Record<string, number>>;
    /**
     * Closes the listener and drops all state. Close the workers first. Calling it again has no
     * effect.
     */
    close(): Promise<void>;
}
/** Handshake metadata of one worker. Plain data apart from the bytes. */
export interface WorkerHandshakeMetadata {
    /** Tensor-parallel rank. */
    readonly tpRank: number;
    /** Pipeline-parallel rank. */
    readonly ppRank: number;
    /** Metadata in the connector's own encoding; the engine passes it on unread. */
    readonly payload: Uint8Array;
}
/** The worker side of a connector: one for each rank. The engine owns it and closes it. */
export interface WorkerConnector {
    /** Name of the connector. */
    readonly name: string;
    /**
     * Registers the caches with the transport (vLLM: `register_kv_caches`). Call it before the first
     * step, and again after `unregisterKvCaches`. The memory must stay open until that or `close` has
     * resolved. Errors: those of the transport and of `@kv/plan` for caches that cannot be
     * transferred.
     */
    registerKvCaches(caches: KvCaches): Promise<void>;
    /**
     * Takes the caches back from the transport, so that the engine may release or move their memory
     * (vLLM: `unregister_kv_caches`, for its sleep mode). Resolves when no transfer can touch them
     * any more. Requests whose KV was arriving are in the next output with
     * `KV_MEMORY_NOT_REGISTERED`; those that waited for readers are in `finishedSending`, and their
     * blocks are free; one that ended after the last step follows after the first step awake. The
     * engine ends or preempts what it computes before, and makes no step until it has called
     * `registerKvCaches` (vLLM: `restore_kv_caches`), `handshakeMetadata` and
     * `SchedulerConnector.setHandshakeMetadata` again. Optional for the connector: an engine cannot
     * sleep without.
     */
    unregisterKvCaches?(): Promise<void>;
    /**
     * Returns this rank's metadata for `SchedulerConnector.setHandshakeMetadata` (vLLM:
     * `get_handshake_metadata`).
     */
    handshakeMetadata(): Promise<WorkerHandshakeMetadata>;
    /**
     * Starts the work of a step (vLLM: `start_load_kv`). It does not wait for a peer. Failures of a
     * request are in a later output.
     */
    startLoad(step: StepMetadata): void;
    /**
     * Called when the KV of a layer is in place while later layers are computed (vLLM:
     * `save_kv_layer`), between `startLoad` and `waitForSave` of a step. After the first call for a
     * request, its blocks stay allocated until `requestFinished` releases them. It does not wait.
     * Optional for the engine and for the connector.
     */
    layerComputed?(layer: ComputedLayer): void;
    /**
     * Resolves when device blocks that a peer may read are staged; immediately where nothing is
     * staged (vLLM: `wait_for_save`). `computed` gives the tokens of each request whose KV is on the
     * device, by request id. A request that it has named once and then leaves out has no new tokens;
     * a request that it has never named counts as computed. Name a request with all of its prompt's
     * tokens in the step that computes the last one. Errors: `KV_STAGING_FAILED` with
     * `details.requestIds`: the engine ends these requests with the reason `error`; all others are
     * staged.
     */
    waitForSave(step: StepMetadata, computed?: Readonly<Record<string, number>>): Promise<void>;
    /** Returns what finished or failed since the last call (vLLM: `get_finished`). */
    collectFinished(): WorkerOutput;
    /**
     * Adds a listener that is called when `collectFinished` has something new, so that an idle engine
     * need not poll.
     */
    onProgress(listener: () => void): void;
    /**
     * Returns counts of the requests, transfers and registrations held, as
     * `SchedulerConnector.outstanding`.
     */
    outstanding(): Readonly<Record<string, number>>;
    /**
     * Waits until no transfer touches the caches, then releases everything. Calling it again has no
     * effect.
     */
    close(): Promise<void>;
}
