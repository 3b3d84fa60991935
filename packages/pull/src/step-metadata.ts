import type { ConnectorStepMetadata, RemoteRequest } from "@kv/connector/building-blocks";
import type { BlockIds } from "@kv/interface";

/** The connector's name in step metadata. A worker refuses another connector's metadata. */
export const PULL = "pull";

/** The orders of the scheduler side to every worker in one step. */
export interface PullStepMetadata extends ConnectorStepMetadata {
  readonly connector: typeof PULL;
  /** D: requests to read. */
  readonly receives: readonly ReceiveOrder[];
  /** D: blocks at P's that nobody here reads any more. Their P's are notified. */
  readonly releases: readonly RemoteRequest[];
  /** D: engine ids of requests that ended before their KV arrived. */
  readonly aborts: readonly string[];
}

/** The blocks that P keeps for a request, from `kv_transfer_params`. */
export interface RemoteBlocks extends RemoteRequest {
  /** Logical block ids at P, per KV cache group. */
  readonly blockIds: BlockIds;
  /** Tokens whose KV the blocks hold; undefined when the parameters do not have the number. */
  readonly numTokens?: number | undefined;
  /**
   * End of the lease on P's clock in seconds, without heartbeats; undefined when the parameters do
   * not have it.
   */
  readonly expirySeconds?: number | undefined;
}

/** An order to receive one request's KV. */
export interface ReceiveOrder {
  /** The engine's id of the request. */
  readonly requestId: string;
  readonly remote: RemoteBlocks;
  /** Blocks to fill, per KV cache group. */
  readonly localBlockIds: BlockIds;
  /** Number of blocks before those, per group, that the local prefix cache supplies. */
  readonly localComputedBlocks: readonly number[];
  /**
   * When the scheduler first saw the request, on its clock in ms. A lease without an expiry time
   * counts from here.
   */
  readonly seenAtMs: number;
}
