import type { BlockIds } from "@kv/interface";

/** A request that runs on a producer, and may be handed to a consumer. Plain data, like all that passes between the two sides. */
export interface SendableRequest {
  readonly requestId: string;
  /** What consumers call it. */
  readonly wireId: string;
  /** Which use of its blocks this is. */
  readonly generation: number;
  readonly blockIds: BlockIds;
  /** Tokens whose KV the blocks hold, or will hold; said of a running request where its layers are written as they are computed. */
  readonly numTokens?: number;
  /** Blocks that hold those tokens, per group: what a consumer gets. */
  readonly promptBlockIds?: BlockIds;
}

export interface LeaseOrder extends SendableRequest {
  readonly numTokens: number;
  readonly promptBlockIds: BlockIds;
  /** On the scheduler's clock. */
  readonly expiresAtMs: number;
  readonly unattendedExpiresAtMs?: number;
}

/** Where a remote engine is, and what it is called. */
export interface RemoteEngine {
  readonly engineId: string;
  readonly host: string;
  readonly port: number;
  readonly tpSize: number;
  readonly dcpSize: number;
  readonly ppSize: number;
  /** Counts the engine's registrations of its cache: a greater number than at the handshake means that it is out of date. */
  readonly registrationGeneration: number;
}

/** A request that a producer has, as `kv_transfer_params` name it. */
export interface RemoteRequest extends RemoteEngine {
  /** The producer's name of the request. */
  readonly requestId: string;
  /** Which process, and which use of the blocks; between our own peers only. */
  readonly lease?: RemoteLease;
}

export interface RemoteLease {
  readonly incarnation: string;
  readonly generation: number;
}

export interface HeartbeatOrder extends RemoteEngine {
  readonly remoteRequestIds: readonly string[];
}
