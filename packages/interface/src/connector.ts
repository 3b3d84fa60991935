import type { KvError } from "./errors.js";
import type { BlockIds, KvCaches } from "./kv-cache.js";

/**
 * A connector has two sides, which may live in different processes: the scheduler side decides, one per engine; the
 * worker side moves bytes, one per rank. What passes between them (`StepMetadata`, `WorkerOutput`, handshake metadata) is
 * plain data that survives JSON and structured clone. The division and the order of calls are vLLM's
 * `KVConnectorBase_V1` (0.33), under names of this project.
 *
 * One engine step: `matchedTokens` and `afterAllocation` for each request that is admitted, `buildStepMetadata`, every worker's
 * `startLoad`, the forward pass, every worker's `collectFinished`, `applyWorkerOutput`.
 */

/** `kv_transfer_params` of an OpenAI-style request or response, as on the wire. Unknown keys are kept. */
export type KvTransferParams = Readonly<Record<string, unknown>>;

export interface ConnectorRequest {
  /** The engine's own id of the request, unique among those alive. */
  readonly requestId: string;
  readonly numPromptTokens: number;
  readonly kvTransferParams: KvTransferParams | undefined;
}

export interface MatchedTokens {
  /** Prompt tokens beyond those computed locally whose KV will come from a peer. */
  readonly tokens: number;
  /** They arrive while the engine does other work: the request waits until its worker reports it as received. */
  readonly async: boolean;
  /**
   * The connector has no room for the request now: nothing is to be allocated, it waits, and is asked for again in a later step (vLLM:
   * `get_num_new_matched_tokens` answers None).
   */
  readonly wait?: boolean | undefined;
}

/** `stopped` and `length` hand blocks to a peer; the rest free them (vLLM: FINISHED_STOPPED, FINISHED_LENGTH_CAPPED). */
export type FinishReason = "stopped" | "length" | "aborted" | "error";

export interface RequestFinished {
  /**
   * The engine must not free the blocks until a worker output reports the request: as sent where peers may read them, as received where a
   * transfer into them was still under way.
   */
  readonly keepBlocks: boolean;
  /** Returned to the client (the proxy), which hands it to the other side. */
  readonly kvTransferParams?: KvTransferParams | undefined;
}

/** What one step asks of every worker. Plain data, made by the connector for its own worker side. */
export interface StepMetadata {
  readonly connector: string;
  readonly step: number;
  readonly [key: string]: unknown;
}

/** A request whose KV did not arrive. */
export interface FailedReceive {
  readonly requestId: string;
  readonly code: KvError["code"];
  readonly message: string;
  /** vLLM's failure_type, such as "handshake_failed" or "transfer_failed". */
  readonly failureType: string;
  /** Which of `failedBlockIds` are named on its account, so that outputs of several workers can be merged. */
  readonly blockIds?: readonly number[] | undefined;
  /**
   * A peer that could not be asked may write to the request's blocks yet. The request fails, whatever the policy;
   * `requestFinished` will answer that the blocks are to be kept, and a later output reports the request as received once more.
   */
  readonly blocksAtRisk?: boolean | undefined;
}

/** A layer of a forward pass that goes on. Plain data. */
export interface ComputedLayer {
  /** Names of the layer's `KvCaches.regions`. */
  readonly regions: readonly string[];
  /** Of how many tokens of each request, by its id, these regions hold the KV now. */
  readonly computedTokens: Readonly<Record<string, number>>;
}

/** What a worker reports after a step. Plain data. */
export interface WorkerOutput {
  /** Prefill side: every reader has the blocks, or the lease ran out. The engine frees them. */
  readonly finishedSending: readonly string[];
  /** Decode side: KV is in place, or the request is in `failedReceiving`; either way nothing touches its blocks any more, but for `blocksAtRisk`. */
  readonly finishedReceiving: readonly string[];
  readonly failedReceiving: readonly FailedReceive[];
  /** Local block ids (group 0) whose content is invalid; the engine recomputes or fails what uses them. */
  readonly failedBlockIds: readonly number[];
  /** For the connector's own scheduler side. */
  readonly connectorData?: unknown;
}

/** What to do with a request whose KV did not arrive (vLLM: `kv_load_failure_policy`). */
export type LoadFailurePolicy = "fail" | "recompute";

export interface SchedulerConnector {
  readonly name: string;
  readonly loadFailurePolicy: LoadFailurePolicy;
  /** Opaque bytes of each worker, `[tpRank, ppRank, bytes]`; opens the side-channel listener. Call once, before the first request. */
  setHandshakeMetadata(workers: readonly WorkerHandshakeMetadata[]): Promise<void>;
  /**
   * The engine has taken a request in, which may wait for room before `matchedTokens` is asked: time for heartbeats to begin (vLLM:
   * `on_new_request`). Never throws for bad parameters; those are `matchedTokens`' to refuse.
   */
  requestQueued?(request: ConnectorRequest): void;
  /** How many tokens a peer will supply. Invalid parameters: `KV_REQUEST_INVALID`, and the peer is told where the protocol allows. */
  matchedTokens(request: ConnectorRequest, numComputedTokens: number): MatchedTokens;
  /** The blocks of the request, those of a local prefix hit first. `externalTokens` is 0 on a full local hit. */
  afterAllocation(request: ConnectorRequest, blockIds: BlockIds, externalTokens: number): void;
  buildStepMetadata(): StepMetadata;
  /** The request ends here, or is aborted; called once, before its blocks are freed. */
  requestFinished(request: ConnectorRequest, blockIds: BlockIds, reason: FinishReason): RequestFinished;
  /** The output of all workers of a step in one: a request is reported when every rank has reported it. */
  applyWorkerOutput(output: WorkerOutput): void;
  /** Work is outstanding that needs engine steps although no request runs. */
  hasPendingWork(): boolean;
  /** Requests, leases, timers and listeners held; all but `listeners` zero after the last request. For tests and `/status`. */
  outstanding(): Readonly<Record<string, number>>;
  close(): Promise<void>;
}

export interface WorkerHandshakeMetadata {
  readonly tpRank: number;
  readonly ppRank: number;
  readonly payload: Uint8Array;
}

export interface WorkerConnector {
  readonly name: string;
  /** Registers the caches with the transport. Call once. */
  registerKvCaches(caches: KvCaches): Promise<void>;
  /** For the scheduler side's `setHandshakeMetadata`. */
  handshakeMetadata(): Promise<WorkerHandshakeMetadata>;
  /** Begins what the step asks for; never waits for a peer. */
  startLoad(step: StepMetadata): void;
  /**
   * The KV of a layer is in place, and later layers are being computed (vLLM: `save_kv_layer`). Between `startLoad` and `waitForSave` of a
   * step; once a layer of a request was reported, its blocks are not taken from it before `requestFinished` lets them go. An engine may
   * leave it out, and so may a connector. Never waits.
   */
  layerComputed?(layer: ComputedLayer): void;
  /**
   * Resolves when device blocks that a peer may read have been staged; at once where nothing is staged. `computed` says of how many tokens of
   * a request the KV is on the device; of requests that it leaves out all blocks are taken to be. Errors: `KV_STAGING_FAILED` with
   * `details.requestIds`, which must end with the reason `error`; the others have been staged.
   */
  waitForSave(step: StepMetadata, computed?: Readonly<Record<string, number>>): Promise<void>;
  /** What has ended since the last call. */
  collectFinished(): WorkerOutput;
  /** Called whenever `collectFinished` would have something to say, so that an idle engine need not poll. */
  onProgress(listener: () => void): void;
  outstanding(): Readonly<Record<string, number>>;
  close(): Promise<void>;
}
