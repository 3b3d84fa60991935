import type {
  BlockIds,
  Clock,
  ConnectorRequest,
  EngineIdentity,
  FinishReason,
  KvCacheConfig,
  KvTransferParams,
  RequestFinished,
} from "@kv/interface";
import { cacheKind, exchangedBlocks } from "@kv/plan";
import {
  blocksDigest,
  encodePrompt,
  encodeRemotePrefillParams,
  type LeaseQuery,
  type LeaseReply,
  type PromptContent,
  promptContent,
  promptDigest,
  readTransferId,
  sameCapability,
  type TransferMode,
} from "@kv/protocol";
import type { ConnectorSettings } from "../config/connector-settings.js";
import type { ListenerAddress } from "../handshake/engine-listener.js";
import { type Generation, Generations } from "../requests/references.js";
import { traceMember } from "../requests/remote-request.js";
import type {
  ConnectorStepMetadata,
  LeaseOrder,
  SendableRequest,
} from "../requests/step-metadata.js";

/** The orders of P's half to the workers in one step. */
export type PrefillStep = Pick<ConnectorStepMetadata, "inBatch" | "notSent" | "leases" | "lost">;

/** Options of `PrefillScheduler`: those of this engine and of its settings, and these. */
export interface PrefillSchedulerOptions
  extends Pick<EngineIdentity, "engineId" | "tpSize" | "ppSize">,
    Pick<ConnectorSettings, "leaseMs" | "decoderBlocksTtlMs">,
    Partial<Pick<ConnectorSettings, "unattendedLeaseMs">> {
  /**
   * Pull's parameters contain the end of the lease. Push's do not, because D does not read (as in
   * vLLM 0.33).
   */
  readonly transferMode: TransferMode;
  readonly clock: Clock;
  readonly config: KvCacheConfig;
  readonly dcpSize: number;
  /**
   * Layerwise push: workers write a request's layers while it runs. They get the prompt's blocks at
   * admission, and the blocks are kept until they report the request, however it ends. @default
   * false
   */
  readonly isLayerwise?: boolean | undefined;
  /**
   * P's one output token is in its parameters, where the engine says how it was sampled. @default
   * false
   */
  readonly seedsFirstToken?: boolean | undefined;
  /** Identifies this process, so that a D can tell a restarted P with the same engine id. */
  readonly incarnation: string;
  /**
   * Where D's shake hands.
   * @throws `KV_INTERNAL` before the side channel is open.
   */
  address(): ListenerAddress;
}

/** A request whose blocks are kept. */
interface KeptRequest {
  /** Digest of the blocks that its parameters name; undefined where it has none. */
  readonly blocks?: string;
  /** Whose KV they hold; undefined where the engine does not know its tokens. */
  readonly content?: PromptContent | undefined;
  /** Whether nobody compared the KV that came from a peer with its prompt. */
  readonly isUnverified?: boolean | undefined;
}

/** What is named to a peer of a request whose blocks are kept. */
interface Offer {
  readonly promptBlockIds: BlockIds;
  /** Tokens from the start of the sequence whose KV the blocks hold. */
  readonly numTokens: number;
  readonly announcedMs: number;
  readonly isDecode: boolean;
}

/**
 * The half of the scheduler side that keeps a finished request's blocks for their readers and
 * returns the `kv_transfer_params` that name them: P's, and with `bidirectional_kv_xfer` also D's.
 * The workers report when the blocks may be freed (`WorkerOutput.finishedSending`).
 */
export class PrefillScheduler {
  readonly #options: PrefillSchedulerOptions;
  readonly #generations: Generations;
  readonly #kept = new Map<string, KeptRequest>();
  #inBatch: SendableRequest[] = [];
  #notSent: string[] = [];
  #leases: LeaseOrder[] = [];
  #lost: string[] = [];

  constructor(options: PrefillSchedulerOptions) {
    this.#options = options;
    this.#generations = new Generations({ clock: options.clock });
  }

  /** Called when a request starts to run whose blocks a D will get. */
  admitted(request: ConnectorRequest, blockIds: BlockIds): void {
    this.#admit(request, blockIds);
  }

  /**
   * As `SchedulerConnector.requestFinished`. `isDecode`: of a D's request, whose KV a P may read
   * back for the next turn. `isUnverified`: nobody compared the KV that it got with its prompt.
   * @throws `KV_INTERNAL` before the side channel is open.
   */
  finished(
    request: ConnectorRequest,
    blockIds: BlockIds,
    reason: FinishReason,
    { isDecode = false, isUnverified = false } = {},
  ): RequestFinished {
    const { clock, config, dcpSize, leaseMs, unattendedLeaseMs, decoderBlocksTtlMs } =
      this.#options;
    const { requestId, numPromptTokens, numComputedTokens } = request;
    const numTokens = isDecode ? numComputedTokens : numPromptTokens;
    if ((reason !== "stopped" && reason !== "length") || numTokens === undefined)
      return this.#drop(requestId);
    const promptBlockIds = exchangedBlocks(blockIds, config, { numTokens, dcpSize });
    if (promptBlockIds.every((group) => group.length === 0)) return this.#drop(requestId);
    const content = promptContent(
      isDecode ? { ...request, promptTokenIds: tokensOf(request) } : request,
    );
    const generation = this.#generations.byRequestId(requestId) ?? this.#admit(request, blockIds);
    const nowMs = clock.now();
    const expiresAtMs = nowMs + (isDecode ? decoderBlocksTtlMs : leaseMs);
    const unattendedExpiresAtMs = isDecode ? expiresAtMs : nowMs + (unattendedLeaseMs ?? leaseMs);
    this.#leases.push({
      requestId,
      wireId: generation.wireId,
      generation: generation.generation,
      capability: generation.capability,
      blockIds,
      ...transferMember(request),
      ...traceMember(request.traceparent),
      ...this.#comparedByWorkers(content),
      numTokens,
      promptBlockIds,
      expiresAtMs,
      unattendedExpiresAtMs,
    });
    // A D of push reads nothing, so it does not ask whether the blocks are held.
    const isPull = this.#options.transferMode === "pull";
    this.#kept.set(
      requestId,
      isPull ? { blocks: blocksDigest(promptBlockIds, numTokens), content, isUnverified } : {},
    );
    // The announced end is valid with and without heartbeats.
    const announcedMs = Math.min(expiresAtMs, unattendedExpiresAtMs);
    const offer = { promptBlockIds, numTokens, announcedMs, isDecode };
    return { keepBlocks: true, kvTransferParams: this.#transferParams(request, generation, offer) };
  }

  /**
   * Called when the workers have registered their caches again: no kept block holds what it did.
   * The workers of before have reported the requests that they knew; those of now report the
   * others.
   */
  cachesLost(): void {
    const { notSent, leases, lost = [] } = this.takeStep();
    this.#notSent = [...notSent];
    const ended = new Set([...lost, ...notSent, ...leases.map(({ requestId }) => requestId)]);
    this.#lost = [...ended].filter((requestId) => this.#kept.has(requestId));
    for (const requestId of this.#kept.keys()) this.#kept.set(requestId, {});
  }

  sent(requestId: string): void {
    this.#kept.delete(requestId);
    this.#generations.end(requestId);
  }

  /**
   * Answers lease queries: `held` means that none of the blocks that D names has gone to another
   * request, and that they hold the KV of D's prompt. They must be the blocks that the request's
   * parameters name, and D must have those parameters.
   */
  holds(query: Omit<LeaseQuery, "engineId">): Pick<LeaseReply, "held" | "prompt"> {
    const { requestId, generation, capability, blocks, prompt } = query;
    const current = this.#generations.byWireId(requestId);
    if (current === undefined || capability === undefined || blocks === undefined)
      return { held: false };
    const kept = this.#kept.get(current.requestId);
    const isMeant =
      current.generation === generation &&
      sameCapability(current.capability, capability) &&
      kept?.blocks === blocks;
    if (!isMeant) return { held: false };
    const digest = kept.content && prompt && promptDigest(kept.content, prompt.numTokens);
    if (digest === undefined || digest !== prompt?.digest)
      return { held: false, prompt: "differs" };
    // The tokens are the same, and nobody knows whether the KV is theirs.
    return kept.isUnverified === true ? { held: true } : { held: true, prompt: "same" };
  }

  takeStep(): PrefillStep {
    const step = { inBatch: this.#inBatch, notSent: this.#notSent, leases: this.#leases };
    const lost = this.#lost;
    this.#inBatch = [];
    this.#notSent = [];
    this.#leases = [];
    this.#lost = [];
    return lost.length === 0 ? step : { ...step, lost };
  }

  get hasStep(): boolean {
    return (
      this.#inBatch.length + this.#notSent.length + this.#leases.length + this.#lost.length > 0
    );
  }

  get running(): number {
    return this.#generations.size - this.#kept.size;
  }

  get leases(): number {
    return this.#kept.size;
  }

  close(): void {
    this.#generations.clear();
    this.#kept.clear();
    this.takeStep();
  }

  #admit(request: ConnectorRequest, blockIds: BlockIds): Generation {
    const { requestId, numPromptTokens, traceparent } = request;
    const generation = this.#generations.begin(requestId);
    // A preempted request is admitted again, with other blocks.
    this.#inBatch.push({
      requestId,
      wireId: generation.wireId,
      generation: generation.generation,
      capability: generation.capability,
      blockIds,
      ...transferMember(request),
      ...traceMember(traceparent),
      ...(this.#options.isLayerwise === true
        ? {
            ...this.#promptOf(numPromptTokens, blockIds),
            ...this.#comparedByWorkers(promptContent(request)),
          }
        : {}),
    });
    return generation;
  }

  /**
   * Drops a request without KV for a D. Layerwise writes may still read the blocks; the workers
   * report when they no longer do.
   */
  #drop(requestId: string): RequestFinished {
    this.#notSent.push(requestId);
    if (
      this.#options.isLayerwise === true &&
      this.#generations.byRequestId(requestId) !== undefined
    ) {
      this.#kept.set(requestId, {});
      return { keepBlocks: true };
    }
    this.#generations.end(requestId);
    return { keepBlocks: false };
  }

  /**
   * In push the workers get the registrations and compare the prompts. In pull this side answers
   * the queries.
   */
  #comparedByWorkers(content: PromptContent | undefined): Pick<SendableRequest, "prompt"> {
    if (content === undefined || this.#options.transferMode === "pull") return {};
    return { prompt: encodePrompt(content) };
  }

  /** Empty while blocks of the prompt are missing: an engine may allocate them chunk by chunk. */
  #promptOf(
    numTokens: number,
    blockIds: BlockIds,
  ): Pick<SendableRequest, "numTokens" | "promptBlockIds"> {
    const { config, dcpSize } = this.#options;
    const isComplete = config.groups.every(({ kind, blockSize }, group) => {
      const { extent } = cacheKind(kind);
      const blockTokens = (blockSize ?? config.blockSize) * dcpSize;
      const needed =
        extent === "state" || extent === "whole" ? 1 : Math.ceil(numTokens / blockTokens);
      return (blockIds[group]?.length ?? 0) >= needed;
    });
    if (!isComplete) return {};
    return { numTokens, promptBlockIds: exchangedBlocks(blockIds, config, { numTokens, dcpSize }) };
  }

  #transferParams(
    request: ConnectorRequest,
    { wireId, generation, capability }: Generation,
    { promptBlockIds, numTokens, announcedMs, isDecode }: Offer,
  ): KvTransferParams {
    const { engineId, tpSize, dcpSize, ppSize, transferMode, incarnation } = this.#options;
    const { host, port, registrationGeneration } = this.#options.address();
    const isPull = transferMode === "pull";
    const firstToken = isDecode ? undefined : this.#firstToken(request);
    return encodeRemotePrefillParams({
      remoteBlockIds: promptBlockIds,
      remoteEngineId: engineId,
      remoteRequestId: wireId,
      remoteHost: host,
      remotePort: port,
      tpSize,
      dcpSize,
      ppSize,
      remoteNumTokens: numTokens,
      remoteBlocksExpiryTime: isPull ? announcedMs / 1000 : undefined,
      remoteRegistrationGeneration: isPull ? registrationGeneration : undefined,
      transferMode,
      isDecoded: isDecode,
      firstToken,
      // The next turn has a transfer id and a trace of its own.
      ...(isDecode ? {} : transferMember(request)),
      lease: {
        incarnation,
        generation,
        capability,
        traceparent: isDecode ? undefined : request.traceparent,
        samplingKey: firstToken === undefined ? undefined : request.samplingKey,
        ...(isPull ? {} : { registrationGeneration }),
      },
    });
  }

  #firstToken({ outputTokenIds, samplingKey }: ConnectorRequest): number | undefined {
    const isKnown = this.#options.seedsFirstToken === true && samplingKey !== undefined;
    return isKnown && outputTokenIds?.length === 1 ? outputTokenIds[0] : undefined;
  }
}

/** The tokens of prompt and output; undefined where the engine does not know them. */
function tokensOf({
  promptTokenIds,
  outputTokenIds,
}: ConnectorRequest): readonly number[] | undefined {
  if (promptTokenIds === undefined || outputTokenIds === undefined) return undefined;
  return [...Array.from(promptTokenIds), ...Array.from(outputTokenIds)];
}

/** @throws `KV_REQUEST_INVALID`. */
function transferMember({ kvTransferParams }: ConnectorRequest): { readonly transferId?: string } {
  const transferId = readTransferId(kvTransferParams);
  return transferId === undefined ? {} : { transferId };
}
