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
import { type Generation, Generations, traceMember } from "../requests/references.js";
import type {
  ConnectorStepMetadata,
  LeaseOrder,
  SendableRequest,
} from "../requests/step-metadata.js";

export type PrefillStep = Pick<ConnectorStepMetadata, "inBatch" | "notSent" | "leases" | "lost">;

export interface PrefillSchedulerOptions
  extends Pick<EngineIdentity, "engineId" | "tpSize" | "ppSize">,
    Pick<ConnectorSettings, "leaseMs" | "decoderBlocksTtlMs">,
    Partial<Pick<ConnectorSettings, "unattendedLeaseMs">> {
  /** A D that is pushed to does not read, so it gets no end of the lease (vLLM 0.33). */
  readonly transferMode: TransferMode;
  readonly clock: Clock;
  readonly config: KvCacheConfig;
  readonly dcpSize: number;
  /**
   * Workers write a request's layers while it runs, and keep its blocks from admission until their
   * report.
   * @default false
   */
  readonly isLayerwise?: boolean | undefined;
  /**
   * P passes its one output token on.
   * @default false
   */
  readonly seedsFirstToken?: boolean | undefined;
  /** Tells a restarted P from the one before. */
  readonly incarnation: string;
  /** @throws `KV_INTERNAL` before the side channel is open. */
  address(): ListenerAddress;
}

interface KeptRequest {
  readonly blocks?: string;
  /** The blocks' content; undefined where the engine does not know the tokens. */
  readonly content?: PromptContent | undefined;
  readonly isUnverified?: boolean | undefined;
}

interface Offer {
  readonly promptBlockIds: BlockIds;
  readonly numTokens: number;
  readonly announcedMs: number;
  readonly isDecode: boolean;
}

/**
 * Keeps a finished request's blocks and returns the `kv_transfer_params` that name them: for P, and
 * with `bidirectional_kv_xfer` for D. The workers report when the blocks may be freed.
 */
export class PrefillScheduler {
  readonly #options: PrefillSchedulerOptions;
  readonly #generations: Generations;
  readonly #kept = new Map<string, KeptRequest>();
  #step = noOrders();

  constructor(options: PrefillSchedulerOptions) {
    this.#options = options;
    this.#generations = new Generations({ clock: options.clock });
  }

  /**
   * `isDecode`: D's request, whose KV a P may read back. `isUnverified`: nobody compared its KV
   * with the prompt.
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
    const generation = this.#generations.byRequestId(requestId) ?? this.admitted(request, blockIds);
    const nowMs = clock.now();
    const expiresAtMs = nowMs + (isDecode ? decoderBlocksTtlMs : leaseMs);
    const unattendedExpiresAtMs = isDecode ? expiresAtMs : nowMs + (unattendedLeaseMs ?? leaseMs);
    this.#step.leases.push({
      ...generation,
      blockIds,
      ...transferMember(request),
      ...traceMember(request.traceparent),
      ...this.#comparedByWorkers(content),
      numTokens,
      promptBlockIds,
      expiresAtMs,
      unattendedExpiresAtMs,
    });
    // A D that is pushed to reads nothing, so it sends no lease queries.
    const isPull = this.#options.transferMode === "pull";
    this.#kept.set(
      requestId,
      isPull ? { blocks: blocksDigest(promptBlockIds, numTokens), content, isUnverified } : {},
    );
    // True with and without heartbeats.
    const announcedMs = Math.min(expiresAtMs, unattendedExpiresAtMs);
    const offer = { promptBlockIds, numTokens, announcedMs, isDecode };
    return { keepBlocks: true, kvTransferParams: this.#transferParams(request, generation, offer) };
  }

  /**
   * The workers registered their caches again, so no kept block has its KV. New workers report
   * requests that the old ones did not know.
   */
  cachesLost(): void {
    const { notSent, leases, lost = [] } = this.takeStep();
    const ended = new Set([...lost, ...notSent, ...leases.map(({ requestId }) => requestId)]);
    this.#step.notSent.push(...notSent);
    this.#step.lost = [...ended].filter((requestId) => this.#kept.has(requestId));
    for (const requestId of this.#kept.keys()) this.#kept.set(requestId, {});
  }

  sent(requestId: string): void {
    this.#kept.delete(requestId);
    this.#generations.end(requestId);
  }

  /** `held`: no named block has gone to another request, and they hold D's prompt. */
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
    if (kept.content === undefined) return { held: false, prompt: "unknown" };
    const digest = prompt && promptDigest(kept.content, prompt.numTokens);
    if (digest === undefined || digest !== prompt?.digest)
      return { held: false, prompt: "differs" };
    // The tokens are equal, but the KV may not be theirs.
    return kept.isUnverified === true ? { held: true } : { held: true, prompt: "same" };
  }

  takeStep(): PrefillStep {
    const { lost, ...step } = this.#step;
    this.#step = noOrders();
    return lost.length === 0 ? step : { ...step, lost };
  }

  get hasStep(): boolean {
    return Object.values(this.#step).some(({ length }) => length > 0);
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

  admitted(request: ConnectorRequest, blockIds: BlockIds): Generation {
    const { requestId, numPromptTokens, traceparent } = request;
    const generation = this.#generations.begin(requestId);
    this.#step.inBatch.push({
      ...generation,
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
   * Without KV for a D, layerwise writes may still read the blocks; the workers report the request.
   */
  #drop(requestId: string): RequestFinished {
    this.#step.notSent.push(requestId);
    const isKnown = this.#generations.byRequestId(requestId) !== undefined;
    if (this.#options.isLayerwise === true && isKnown) {
      this.#kept.set(requestId, {});
      return { keepBlocks: true };
    }
    this.#generations.end(requestId);
    return { keepBlocks: false };
  }

  /** In push the workers compare the prompts; in pull this side answers queries. */
  #comparedByWorkers(content: PromptContent | undefined): Pick<SendableRequest, "prompt"> {
    if (content === undefined || this.#options.transferMode === "pull") return {};
    return { prompt: encodePrompt(content) };
  }

  /** Empty until an engine that allocates by chunk has all of the prompt's blocks. */
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

const noOrders = () => ({
  inBatch: [] as SendableRequest[],
  notSent: [] as string[],
  leases: [] as LeaseOrder[],
  lost: [] as string[],
});

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
