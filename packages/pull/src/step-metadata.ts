import { type PairStepMetadata, pairStepMetadata, type RemoteRequest } from "@kv/connector";
import type { BlockIds, StepMetadata } from "@kv/interface";

/** What the scheduler side asks of every worker in one step. */
export interface PullStepMetadata extends PairStepMetadata {
  readonly connector: typeof PULL;
  /** Decode: what to read, or to tell a peer that it is not going to be read. */
  readonly receives: readonly ReceiveOrder[];
  /** Decode: requests that ended before their KV arrived. */
  readonly aborts: readonly string[];
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

/** Errors: those of `pairStepMetadata`. */
export function pullStepMetadata(step: StepMetadata): PullStepMetadata {
  return pairStepMetadata<PullStepMetadata>(step, PULL, ["receives", "aborts"]);
}
