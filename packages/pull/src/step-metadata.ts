import type { ConnectorStepMetadata, RemoteRequest } from "@kv/connector/building-blocks";
import type { BlockIds } from "@kv/interface";

/** A worker refuses another connector's metadata. */
export const PULL = "pull";

/** What every worker gets in a step. */
export interface PullStepMetadata extends ConnectorStepMetadata {
  readonly connector: typeof PULL;
  /** D: requests to read. */
  readonly receives: readonly ReceiveOrder[];
  /** D: P's blocks that nobody here reads any more; P is notified. */
  readonly releases: readonly RemoteRequest[];
  /** D: engine ids of requests that ended before their KV arrived. */
  readonly aborts: readonly string[];
}

/** The blocks that P keeps, from `kv_transfer_params`. */
export interface RemoteBlocks extends RemoteRequest {
  /** Logical ids at P, per KV cache group. */
  readonly blockIds: BlockIds;
  /** Tokens whose KV the blocks hold, where P says it. */
  readonly numTokens?: number | undefined;
}

export interface ReceiveOrder {
  readonly requestId: string;
  readonly remote: RemoteBlocks;
  readonly localBlockIds: BlockIds;
  /** Blocks before those, per group, from the local prefix cache. */
  readonly localComputedBlocks: readonly number[];
  /**
   * The scheduler first saw the request then; its clock in ms. A lease without an expiry counts
   * from here.
   */
  readonly seenAtMs: number;
}
