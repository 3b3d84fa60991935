import type { ConnectorStepMetadata, RemoteRequest } from "@kv/connector/building-blocks";
import type { BlockIds } from "@kv/interface";

/** What every worker gets in a step. Plain data: the workers may be other processes. */
export interface PushStepMetadata extends ConnectorStepMetadata {
  /** A worker refuses another connector's metadata. */
  readonly connector: typeof PUSH;
  /** D: blocks to register, and requests whose blocks P may free. */
  readonly registrations: readonly RegistrationOrder[];
  /** D: engine ids of requests aborted before their KV arrived. */
  readonly withdrawals: readonly string[];
}

/** Registers one request's blocks with its P. */
export interface RegistrationOrder extends RegisteredBlocks {
  readonly requestId: string;
  /** P's notifications name the request by it. */
  readonly wireId: string;
  /** Only messages with it act on the registration. */
  readonly secret: string;
  /** Grows with every order; never reused. */
  readonly generation: number;
  /** All generations before it have ended. */
  readonly oldestOpen: number;
  /** P, and its name of the request. */
  readonly remote: RemoteRequest;
  /** Of this engine's handshake listener. */
  readonly host: string;
  readonly port: number;
  /** Counts this engine's registrations of its KV cache. */
  readonly registrationGeneration?: number | undefined;
}

export interface RegisteredBlocks {
  /** P's blocks per group, where known. Only their number is used. */
  readonly remoteBlockIds?: BlockIds | undefined;
  /** Logical ids per group that P writes into. An empty list lets P free its blocks. */
  readonly localBlockIds: BlockIds;
  /** Blocks per group before those, from the local prefix cache. */
  readonly localComputedBlocks: readonly number[];
  /** Tokens from the start of the prompt whose KV D has at the end. */
  readonly numTokens: number;
  /** Digest of these tokens; undefined where the engine does not know them. */
  readonly promptDigest?: string | undefined;
  /** The engine waits for the outcome. */
  readonly isAwaited: boolean;
}

export const PUSH = "push";
