import type { ConnectorStepMetadata, RemoteRequest } from "@kv/connector/building-blocks";
import type { BlockIds } from "@kv/interface";

/**
 * The orders of the scheduler side to every worker in one step. Plain data: the workers may be
 * other processes.
 */
export interface PushStepMetadata extends ConnectorStepMetadata {
  /** Always `"push"`. A worker refuses the metadata of another connector. */
  readonly connector: typeof PUSH;
  /** Decode: blocks to register with producers, and requests whose blocks producers may free. */
  readonly registrations: readonly RegistrationOrder[];
  /** Decode: ids of requests that the engine aborted before their KV arrived. */
  readonly withdrawals: readonly string[];
}

/** Registers the blocks of one request with the producer that computes its prompt. */
export interface RegistrationOrder {
  /** The engine's id of the request. */
  readonly requestId: string;
  /** The id that the producer uses for the request in its notifications. */
  readonly wireId: string;
  /** D's secret for this producer. Messages about the registration count only with it. */
  readonly secret: string;
  /** The use of the blocks. It grows with every order and is never assigned again. */
  readonly generation: number;
  /** The oldest generation that is open. All generations before it have ended. */
  readonly oldestOpen: number;
  /** The producer, and its name of the request. */
  readonly remote: RemoteRequest;
  /** The producer's blocks per group, if its parameters had them. Only their number is used. */
  readonly remoteBlockIds?: BlockIds | undefined;
  /**
   * Logical block ids per group that the producer writes into. An empty list means that the
   * producer may free its blocks.
   */
  readonly localBlockIds: BlockIds;
  /** The number of blocks per group before those, which the local prefix cache supplies. */
  readonly localComputedBlocks: readonly number[];
  /** The number of tokens, from the beginning of the prompt, whose KV the engine has at the end. */
  readonly numTokens: number;
  /** Of these tokens, see `promptDigest`; undefined where the engine does not know them. */
  readonly promptDigest?: string | undefined;
  /** True if the engine waits for the outcome. */
  readonly isAwaited: boolean;
  /** The host of this engine's handshake listener. */
  readonly host: string;
  /** The port of this engine's handshake listener. */
  readonly port: number;
  /** How often this engine has registered its KV cache. */
  readonly registrationGeneration?: number | undefined;
}

/** The connector's name in step metadata. */
export const PUSH = "push";
