import type {
  BlockIds,
  Clock,
  ConnectorRequest,
  FinishReason,
  KvCacheConfig,
  RequestFinished,
} from "@kv/interface";
import { cacheKind, exchangedBlocks } from "@kv/plan";
import { encodeRemotePrefillParams } from "@kv/protocol";
import { createGenerations, type Generation } from "./generations.js";
import type { LeaseOrder, SendableRequest } from "./step-types.js";

/**
 * The producer's half of the scheduler side: keeps a finished request's blocks for its readers and says where they are. The
 * workers say when they may go (`WorkerOutput.finishedSending`).
 */
export interface PrefillScheduler {
  /** A request whose blocks a peer will read runs from now on. */
  admitted(request: ConnectorRequest, blockIds: BlockIds): void;
  finished(request: ConnectorRequest, blockIds: BlockIds, reason: FinishReason): RequestFinished;
  sent(requestId: string): void;
  /** Whether these blocks are still kept, for `leases-check`: true means that not one of them has gone to another request. */
  holds(wireId: string, generation: number | undefined): boolean;
  takeStep(): PrefillStep;
  hasStep(): boolean;
  readonly running: number;
  readonly leases: number;
  close(): void;
}

export interface PrefillStep {
  readonly inBatch: readonly SendableRequest[];
  readonly notSent: readonly string[];
  readonly leases: readonly LeaseOrder[];
}

export interface PrefillSchedulerOptions {
  /** Pull tells when the lease ends, push does not: nobody reads there (vLLM 0.33). */
  readonly transferMode: "pull" | "push";
  readonly clock: Clock;
  readonly config: KvCacheConfig;
  readonly engineId: string;
  readonly tpSize: number;
  readonly dcpSize: number;
  readonly ppSize: number;
  readonly leaseMs: number;
  /** `VLLM_NIXL_ABORT_REQUEST_TIMEOUT`: the lease of a request whose reader sends no heartbeats. */
  readonly unattendedLeaseMs?: number;
  /**
   * Workers write a request's layers while it runs: they are told of its prompt from the begin, and its blocks are kept until they report it,
   * however it ends. Default false.
   */
  readonly layerwise?: boolean;
  /** Changes with every process, so that a reader can tell a restarted producer of the same engine id. */
  readonly incarnation: string;
  /** Where readers shake hands; known once the listener is open. */
  sideChannel(): { readonly host: string; readonly port: number };
  registrationGeneration(): number;
}

export function createPrefillScheduler(options: PrefillSchedulerOptions): PrefillScheduler {
  const { clock, leaseMs, unattendedLeaseMs } = options;
  const generations = createGenerations({ clock });
  const kept = new Set<string>();
  let inBatch: SendableRequest[] = [];
  let notSent: string[] = [];
  let leases: LeaseOrder[] = [];

  function drop(requestId: string): RequestFinished {
    notSent.push(requestId);
    if (options.layerwise === true && generations.byRequestId(requestId) !== undefined) {
      kept.add(requestId);
      return { keepBlocks: true };
    }
    generations.end(requestId);
    return { keepBlocks: false };
  }

  function admit({ requestId, numPromptTokens }: ConnectorRequest, blockIds: BlockIds): Generation {
    const { wireId, ...generation } = generations.begin(requestId);
    // A request that was preempted comes again, with other blocks.
    inBatch.push({
      requestId,
      wireId,
      generation: generation.generation,
      blockIds,
      ...(options.layerwise === true ? promptOf(numPromptTokens, blockIds) : {}),
    });
    return { wireId, ...generation };
  }

  /** Nothing when the blocks are not all there yet: an engine may allocate them chunk by chunk. */
  function promptOf(
    numTokens: number,
    blockIds: BlockIds,
  ): Pick<SendableRequest, "numTokens" | "promptBlockIds"> {
    const { config, dcpSize } = options;
    const whole = config.groups.every(({ kind, blockSize }, group) => {
      const { extent } = cacheKind(kind);
      const tokens = (blockSize ?? config.blockSize) * dcpSize;
      const needed = extent === "state" || extent === "whole" ? 1 : Math.ceil(numTokens / tokens);
      return (blockIds[group]?.length ?? 0) >= needed;
    });
    if (!whole) return {};
    return { numTokens, promptBlockIds: exchangedBlocks(blockIds, config, { numTokens, dcpSize }) };
  }

  function takeStep(): PrefillStep {
    const step = { inBatch, notSent, leases };
    inBatch = [];
    notSent = [];
    leases = [];
    return step;
  }

  return {
    admitted: (request, blockIds) => void admit(request, blockIds),
    finished(request, blockIds, reason) {
      const { requestId } = request;
      if (reason !== "stopped" && reason !== "length") return drop(requestId);
      const remoteBlockIds = exchangedBlocks(blockIds, options.config, {
        numTokens: request.numPromptTokens,
        dcpSize: options.dcpSize,
      });
      if (remoteBlockIds.every((group) => group.length === 0)) return drop(requestId);
      const generation = generations.byRequestId(requestId) ?? admit(request, blockIds);
      const nowMs = clock.now();
      const expiresAtMs = nowMs + leaseMs;
      const unattendedExpiresAtMs = nowMs + (unattendedLeaseMs ?? leaseMs);
      leases.push({
        requestId,
        wireId: generation.wireId,
        generation: generation.generation,
        blockIds,
        numTokens: request.numPromptTokens,
        promptBlockIds: remoteBlockIds,
        expiresAtMs,
        unattendedExpiresAtMs,
      });
      kept.add(requestId);
      return {
        keepBlocks: true,
        // What is promised holds with and without heartbeats.
        kvTransferParams: handOver(generation, remoteBlockIds, request.numPromptTokens, {
          ...options,
          expiresAtMs: Math.min(expiresAtMs, unattendedExpiresAtMs),
        }),
      };
    },
    sent(requestId) {
      kept.delete(requestId);
      generations.end(requestId);
    },
    holds(wireId, generation) {
      const current = generations.byWireId(wireId);
      if (current === undefined || !kept.has(current.requestId)) return false;
      return generation === undefined || current.generation === generation;
    },
    takeStep,
    hasStep: () => inBatch.length + notSent.length + leases.length > 0,
    close() {
      generations.clear();
      kept.clear();
      takeStep();
    },
    get running() {
      return generations.size - kept.size;
    },
    get leases() {
      return kept.size;
    },
  };
}

/** `kv_transfer_params` with vLLM 0.33's keys; `kv_peer` is ours, and passes through proxies and vLLM untouched. */
function handOver(
  { wireId, generation }: Generation,
  remoteBlockIds: BlockIds,
  numTokens: number,
  options: PrefillSchedulerOptions & { expiresAtMs: number },
): Record<string, unknown> {
  const { host, port } = options.sideChannel();
  return {
    ...encodeRemotePrefillParams({
      remoteBlockIds,
      remoteEngineId: options.engineId,
      remoteRequestId: wireId,
      remoteHost: host,
      remotePort: port,
      tpSize: options.tpSize,
      dcpSize: options.dcpSize,
      ppSize: options.ppSize,
      remoteNumTokens: numTokens,
      ...(options.transferMode === "pull"
        ? {
            remoteBlocksExpiryTime: options.expiresAtMs / 1000,
            remoteRegistrationGeneration: options.registrationGeneration(),
          }
        : {}),
      transferMode: options.transferMode,
    }),
    kv_peer: { incarnation: options.incarnation, generation },
  };
}
