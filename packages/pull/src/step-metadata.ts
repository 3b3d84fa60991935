import type { HeartbeatOrder, LeaseOrder, RemoteRequest, SendableRequest } from "@kv/connector";
import { type BlockIds, KvError, type StepMetadata } from "@kv/interface";

/** What the scheduler side asks of every worker in one step. Plain data: the sides may live in different processes. */
export interface PullStepMetadata extends StepMetadata {
  readonly connector: typeof PULL;
  /** The scheduler's clock when this was built. Other processes' clocks have other origins: workers rebase deadlines by it. */
  readonly schedulerClockMs: number;
  /** Prefill: requests that run and may be handed to readers; a reader can be done before the step that grants the lease. */
  readonly inBatch: readonly SendableRequest[];
  /** Prefill: of those, the ones that ended without anything to send. */
  readonly notSent: readonly string[];
  /** Prefill: requests that finished; their blocks wait for readers. */
  readonly leases: readonly LeaseOrder[];
  /** Decode: what to read, or to tell a peer that it is not going to be read. */
  readonly receives: readonly ReceiveOrder[];
  /** Decode: requests that ended before their KV arrived. */
  readonly aborts: readonly string[];
  /** Decode: leases to keep alive, whole; null when nothing changed since the last step. */
  readonly heartbeats: readonly HeartbeatOrder[] | null;
}

/** The blocks that a producer keeps for a request, from `kv_transfer_params`. */
export interface RemoteBlocks extends RemoteRequest {
  readonly blockIds: BlockIds;
  readonly numTokens?: number;
  /** End of the lease on the producer's clock, heartbeats aside; absent where the producer did not say. */
  readonly expirySeconds?: number;
}

export interface ReceiveOrder {
  readonly requestId: string;
  readonly remote: RemoteBlocks;
  /** Blocks to fill, per group; no block at all: nothing is read, the producer is told that it may free. */
  readonly localBlockIds: BlockIds;
  /** Blocks before those, per group, that the local prefix hit supplies. */
  readonly localComputedBlocks: readonly number[];
  /** The engine waits for the outcome. */
  readonly awaited: boolean;
  /** When the scheduler first saw the request, on its clock: where the producer names no expiry its lease counts from here. */
  readonly seenAtMs: number;
}

/** The name that step metadata carries: a worker refuses another connector's. */
export const PULL = "pull";

/** Narrows what the engine passed on. Errors: `KV_INTERNAL` for another connector's metadata, which only a wiring mistake brings here. */
export function pullStepMetadata(step: StepMetadata): PullStepMetadata {
  const { inBatch, notSent, leases, receives, aborts, heartbeats, schedulerClockMs } = step;
  const lists = [inBatch, notSent, leases, receives, aborts].every(Array.isArray);
  if (
    step.connector !== PULL ||
    !lists ||
    typeof schedulerClockMs !== "number" ||
    !(heartbeats === null || Array.isArray(heartbeats))
  ) {
    throw new KvError(
      "KV_INTERNAL",
      `step ${step.step} carries metadata of connector "${step.connector}"; this worker is of "${PULL}"`,
      { hint: "build the scheduler side and the worker side from the same connector name" },
    );
  }
  return step as PullStepMetadata;
}
